"""Fine-tuning a pretrained model, with the settings of ACCO's fine-tuning of GPT-Neo 2.7B on Alpaca (arXiv 2406.02613, Table 5).

Which model and which examples is yours to say: `--set model.path=FOLDER --set data.path=FILE.jsonl`.

AdamW at 2e-5 along a cosine, without decay or warm-up; sequences of at most 512 tokens, padded to the longest of their batch; 8
islands, micro-batches of 4, 2 of them in each half of a batch, so that 128 sequences make an update. The paper's 50,000
micro-batches, over all islands, are 1,562 updates. It clips nothing. The module is bfloat16 itself, as the paper's is, beside
masters and moments in single precision. What the paper leaves open: the loss is over all tokens, every token weighs the same, and
the rate goes down to 0.
"""

from __future__ import annotations

from atoll.algorithms.acco import ACCO
from atoll.data.instructions import Instructions
from atoll.models.pretrained import Pretrained
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine
from atoll.runs.cluster import Cluster
from atoll.runs.run import Keep, Run, Train


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
