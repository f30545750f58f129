# A model of an image that serves exported models. `make dist` writes the wheel; then, from the project's folder:
#
#   docker build -f docs/serve.Dockerfile -t translate .
#   docker run -p 8000:8000 -v "$PWD/runs/mine-onnx:/model:ro" --stop-timeout 40 translate en-de=/model
FROM python:3.13-slim
COPY dist/*.whl /wheels/
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[serve]" && useradd --no-create-home serve
USER serve
EXPOSE 8000
HEALTHCHECK --start-period=60s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready')"]
ENTRYPOINT ["mlx-transformer", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["/model"]
