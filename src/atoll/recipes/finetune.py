"""Fine-tuning a pretrained model, with the settings of ACCO's fine-tuning of GPT-Neo 2.7B on Alpaca (arXiv 2406.02613, Table 5).

Set the model and the examples: `--set model.path=FOLDER --set data.path=FILE.jsonl`.

AdamW at 2e-5 along a cosine, without decay, warm-up or clipping. Sequences have at most 512 tokens and are padded to the longest of
their batch. 8 islands compute micro-batches of 4, 2 of them in each half of a batch, so an update has 128 sequences. The paper's
50,000 micro-batches, over all islands, are 1,562 updates. The module is in bfloat16, as in the paper; master weights and moments
are in float32. The paper does not say, and this recipe chooses: the loss is over all tokens, each token has the same weight, and
the rate goes down to 0.
"""

from __future__ import annotations

from atoll.algorithms.acco import ACCO
from atoll.data.instructions import Instructions
from atoll.models.pretrained import Pretrained
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine
from atoll.runs.cluster import Cluster
from atoll.runs.run_settings import Keep, Run, Train


def finetune() -> Run:
    """Fine-tunes a Hugging Face model from disk; needs --set model.path=FOLDER --set data.path=FILE.jsonl."""
    return Run(
        recipe="finetune",
        model=Pretrained(),
        data=Instructions(max_len=512),
        algorithm=ACCO(pieces_per_half=2, weigh="tokens"),
        optimizer=AdamW(lr=Cosine(lr=2e-5, warmup=0, floor=0.0), betas=(0.9, 0.95), weight_decay=0.0),
        train=Train(steps=1_562, batch_size=16, clip_norm=None, device="auto", precision="all-bf16"),
        cluster=Cluster(islands=8, step_time_s=(1.0,)),
        keep=Keep(evaluate_every=100, save_every=500),
    )
