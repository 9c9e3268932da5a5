"""Fine-tune a Hugging Face model on a file of prompts and answers, and export a folder that transformers loads.

The example runs offline: it creates a model of twelve thousand random parameters and a file of sums of digits. A model of that size
learns the form of the answers and not how to add. For your own model and data, replace the two paths `model` and `examples`. Needs
`pip install -e ".[hf]"`.
"""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import atoll
from atoll.core.events import Evaluated
from atoll.telemetry import read_events
from atoll.testing.tiny_pretrained_model import SUMS, save_tiny_model, write_jsonl

model = save_tiny_model("models/tiny")
examples = write_jsonl("sums.jsonl", SUMS)

run = replace(
    atoll.recipes.finetune(),  # ACCO with the paper's settings for GPT-Neo; every token has the same weight
    model=atoll.Pretrained(path=str(model)),
    data=atoll.Instructions(path=str(examples), learn="answer"),
    optimizer=atoll.AdamW(lr=atoll.Cosine(lr=0.01, warmup=5, floor=0.0)),
    train=atoll.Train(steps=40, batch_size=8),
    cluster=atoll.Cluster(islands=2),
    keep=atoll.Keep(evaluate_every=10, save_every=40),
)
result = atoll.run(run, out="runs/sums")
for event in read_events(Path(result.folder) / "events.jsonl", kinds=(Evaluated,)):
    print(f"after {event.steps:2} updates: loss {event.loss:.3f} on held-out answers")

folder = atoll.export(result.folder, "models/sums")
tuned, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
prompt = tokenizer("2+3=", return_tensors="pt")
with torch.no_grad():
    answer = tuned.generate(**prompt, max_new_tokens=4, do_sample=False, pad_token_id=tokenizer.eos_token_id)
print(f"{folder} generates {tokenizer.decode(answer[0], skip_special_tokens=True)!r}")
