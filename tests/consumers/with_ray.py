"""Ray on this machine: a text and requests by two workers, one of which is killed in the midst of each.

python with_ray.py MODEL TEXT OUT FOLDER -> JSON: the answers, and who gave them.
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

MODEL, TEXT, OUT, FOLDER = sys.argv[1:]
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


def ask(text, until=PATIENCE):
    """The answer, asked for again while a replica that is dead isn't known to be; Serve tells such requests."""
    body = json.dumps({"text": text}).encode()
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
ray_corpus.translate_corpus(MODEL, TEXT, OUT, workers=2, of=DiesOnce)

os.environ["MODEL"] = MODEL
import ray_serve  # noqa: E402 - which reads MODEL

serve.start(http_options={"port": 8127})
serve.run(ray_serve.app)
texts = Path(TEXT).read_text(encoding="utf-8").split("\n")[:LINES]
answers = []
for number, text in enumerate(texts):
    answers.append(ask(text))
    if number == LINES // 4:
        os.kill(answers[-1]["worker"], signal.SIGKILL)
answers += [ask(text) for text in texts]
serve.shutdown()
ray.shutdown()
print(json.dumps({"answers": answers, "texts": texts * 2, "killed": KILLED.exists()}))
