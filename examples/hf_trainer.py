"""Hugging Face's Trainer on islands: one call at the top, and a callback. (Needs `pip install "atoll[hf]"`.)

    torchrun --nproc-per-node 2 examples/hf_trainer.py

Each process trains a tiny GPT-2 on its own half of the text, with a Trainer of its own. Every 10 steps they agree.
"""

import inspect

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import atoll
from atoll.integrations.hf import IslandsCallback, alone

rank, size = alone()  # before there are TrainingArguments: they would take torchrun's processes for their own
text = torch.tensor(list(inspect.getsource(inspect).encode()))  # bytes of the standard library
pieces = text[: len(text) // 32 * 32].view(-1, 32)[:512]
mine = [{"input_ids": piece, "labels": piece} for piece in pieces[rank::size]]  # this island's share

model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2))
arguments = TrainingArguments(
    output_dir=f"out/island{rank}",  # each island saves its own
    num_train_epochs=2,
    per_device_train_batch_size=8,
    learning_rate=3e-3,
    save_strategy="no",
    logging_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
callback = IslandsCallback(atoll.DiLoCo(inner_steps=10))
trainer = Trainer(model, arguments, train_dataset=mine, callbacks=[callback])
with callback:  # so that the others hear at once if this one fails
    trainer.train()
trainer.save_model()  # what all agreed on; checkpoints on the way are this island's own

islands = callback.islands
with torch.no_grad():
    held_out = pieces[-8:].to(model.device)
    loss = model(input_ids=held_out, labels=held_out).loss
print(f"island {islands.rank} of {islands.size}: loss {loss:.4f} after {islands.rounds} agreements", flush=True)
