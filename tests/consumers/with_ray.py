"""Ray on this machine: a text and requests by two workers, one of which is killed in the midst of each.

python with_ray.py TRANSLATOR DECODER TEXT OUT FOLDER -> JSON: the answers of each, and who gave them.
"""

import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path

import ray
import ray_corpus
from ray import serve

TRANSLATOR, DECODER, TEXT, OUT, FOLDER = sys.argv[1:]
KILLED = Path(FOLDER) / "killed"
LINES = 40
PATIENCE = 120.0  # seconds


class DiesOnce(ray_corpus.Translate):
    def __call__(self, batch):
        try:
            KILLED.touch(exist_ok=False)
        except FileExistsError:
            (Path(FOLDER) / f"worker-{os.getpid()}").touch()
            return super().__call__(batch)
        os.kill(os.getpid(), signal.SIGKILL)


def ask(asked, until=PATIENCE):
    """The answer, asked for again while a replica that is dead isn't known to be; Serve tells such requests."""
    body = json.dumps(asked).encode()
    begin = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen("http://127.0.0.1:8127/", body, timeout=PATIENCE) as answer:
                return json.load(answer)
        except OSError:
            if time.monotonic() - begin > until:
                raise
            time.sleep(0.2)


ray.init(num_cpus=4, include_dashboard=False, logging_level="error", log_to_driver=False)
ray_corpus.translate_corpus(TRANSLATOR, TEXT, OUT, workers=2, of=DiesOnce)

import ray_serve  # noqa: E402

texts = [text for text in Path(TEXT).read_text(encoding="utf-8").split("\n") if text][:LINES]
chats = [{"messages": [{"role": "user", "content": text}]} for text in texts[:4]]
asked = {TRANSLATOR: [{"text": text} for text in texts] * 2, DECODER: [{"text": text} for text in texts] + chats * 2}
answers = {}
serve.start(http_options={"port": 8127})
for model, requests in asked.items():
    serve.run(ray_serve.Answers.bind(model))
    answers[model] = []
    begin = time.monotonic()
    for number, request in enumerate(requests):
        answers[model].append(ask(request))
        workers = {answer["worker"] for answer in answers[model]}
        if number == LINES // 4:
            os.kill(answers[model][-1]["worker"], signal.SIGKILL)
        # A new worker takes seconds to start: the last request is asked again until it answers, too.
        elif number == len(requests) - 1 and len(workers) < 3 and time.monotonic() - begin < PATIENCE:
            time.sleep(0.5)
            requests.append(request)
serve.shutdown()
ray.shutdown()
print(json.dumps({"answers": [*answers.values()], "asked": [*asked.values()], "killed": KILLED.exists()}))
