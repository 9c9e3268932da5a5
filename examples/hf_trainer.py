"""Hugging Face's Trainer on islands: one call at the top and one callback. Needs `pip install -e ".[hf]"`.

    torchrun --nproc-per-node 2 examples/hf_trainer.py

Each process is an island. It trains a tiny GPT-2 on its half of the text with its own Trainer. The islands average every 10 steps.
"""

import inspect

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import atoll
from atoll.integrations.hf import IslandsCallback, alone

rank, size = alone()  # before TrainingArguments, which would set up data-parallel training over torchrun's processes
text = torch.tensor(list(inspect.getsource(inspect).encode()))  # bytes of the standard library
sequences = text[: len(text) // 32 * 32].view(-1, 32)[:512]
shard = [{"input_ids": sequence, "labels": sequence} for sequence in sequences[rank::size]]

model = GPT2LMHeadModel(
    GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)
)
arguments = TrainingArguments(
    output_dir=f"out/island{rank}",  # every island saves its own checkpoints
    num_train_epochs=2,
    per_device_train_batch_size=8,
    learning_rate=3e-3,
    save_strategy="no",
    logging_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
callback = IslandsCallback(atoll.DiLoCo(inner_steps=10))
trainer = Trainer(model, arguments, train_dataset=shard, callbacks=[callback])
with callback:  # if this island raises, the other islands learn it at once
    trainer.train()
trainer.save_model()  # the agreed weights; checkpoints during training hold this island's own weights

islands = callback.islands
with torch.no_grad():
    held_out = sequences[-8:].to(model.device)
    loss = model(input_ids=held_out, labels=held_out).loss
print(f"island {islands.rank} of {islands.size}: loss {loss:.4f} after {islands.rounds} rounds", flush=True)
