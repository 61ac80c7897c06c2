"""lm-evaluation-harness: python lm_eval_client.py URL MODEL TASK; prints what it asked and got."""

import json
import sys
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

url, model, task = sys.argv[1:]
chats = model == "local-chat-completions"
route = "chat/completions" if chats else "completions"
arguments: dict[str, Any] = {"model": "demo", "base_url": f"{url}/v1/{route}", "max_length": 256}
if chats:
    arguments["tokenizer_backend"] = "None"
    arguments["tokenized_requests"] = False
else:
    arguments["tokenizer_backend"] = "remote"
    arguments["num_concurrent"] = 2
results = simple_evaluate(
    model=model,
    model_args=arguments,
    tasks=[task],
    task_manager=TaskManager(include_path="tasks", include_defaults=False),
    batch_size=1 if chats else 3,
    log_samples=True,
    apply_chat_template=chats,
    bootstrap_iters=0,
)
assert results is not None
samples = [
    {"asked": sample["arguments"], "got": sample["resps"], "target": sample["target"]}
    for sample in results["samples"][task]
]
print(json.dumps({"scores": results["results"][task], "samples": samples}, default=str))  # noqa: T201
