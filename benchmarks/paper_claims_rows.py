"""The rows of `paper_claims.py`: one workload, all methods of the three papers, each at its own best rates.

The inner rate and the outer rule of every method are chosen on a seed that no table reports (`paper_claims_choices.py`). All other
rows of the method reuse the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ablations import Group
from cells import Row

ONE, UPDATES, DILOCO, LARGE = "one worker", "updates", "DiLoCo", "batch"
SYNC, NAIVE, BUFFER, DELAYED = "DiLoCo, unequal workers", "naive", "buffer", "Delayed Nesterov, DyLU"
OVERLAPPED, ACCO, FREE, DPU, WP = "DDP, overlapped", "ACCO", "ACCO, free batch, bf16", "DPU", "WP"
ZERO, FREE_DPU, FREE_WP = "ZeRO-1, overlapped", "DPU, free batch, bf16", "WP, free batch, bf16"
SPARSE, EAGER, MUON, MUON_BATCH = "SparseLoCo", "eager updates", "Muon inside", "Muon, batch"
DENSE, STREAMING = "DiLoCo, fp32", "streaming, 4 fragments"
RECIPES = {ONE: "demo-ddp", LARGE: "demo-ddp", UPDATES: "demo-ddp", DILOCO: "demo-diloco", SYNC: "demo-diloco"}
RECIPES |= dict.fromkeys((NAIVE, BUFFER, DELAYED), "demo-async")
RECIPES |= {OVERLAPPED: "demo-ddp", ACCO: "demo-acco", FREE: "demo-acco", DPU: "demo-dpu", WP: "demo-wp"}
RECIPES |= {ZERO: "demo-zero1", FREE_DPU: "demo-dpu", FREE_WP: "demo-wp"}
RECIPES |= {SPARSE: "demo-sparseloco", EAGER: "demo-eager", MUON: "demo-muloco", MUON_BATCH: "demo-ddp"}
RECIPES |= {DENSE: "demo-diloco", STREAMING: "demo-streaming"}
CHOSEN_BY = {SYNC: DILOCO, OVERLAPPED: LARGE, ZERO: LARGE, FREE: ACCO, FREE_DPU: DPU, FREE_WP: WP, DENSE: DILOCO, STREAMING: DILOCO}
"""Rows that reuse another method's choice."""
METHODS = tuple(method for method in RECIPES if method not in CHOSEN_BY)
BEYOND = (SPARSE, EAGER, MUON, MUON_BATCH)
"""Methods of other papers, which choose after all rows of the three papers."""
OF_THE_PAPERS = tuple(method for method in METHODS if method not in BEYOND)
HUB = (NAIVE, BUFFER, DELAYED)
OVERLAPS = (OVERLAPPED, ZERO, ACCO, FREE, DPU, FREE_DPU, WP, FREE_WP)
EXCHANGES = (DENSE, STREAMING, *BEYOND)


@dataclass(frozen=True)
class Choice:
    """A method's inner rate, and its outer rule as learning rate and momentum."""

    rate: float
    outer: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The workload and the values of the rows."""

    text: str  # the folder of the prepared text
    model: str
    larger: str  # the model of the rows with a larger one
    device: str = "cpu"
    together: str = "auto"  # how the islands of one GPU compute
    seq_len: int = 64
    batch_size: int = 32
    eval_batches: int = 128
    steps: int = 3000
    warm_start: int = 1000
    warmup: int = 200
    rates: tuple[float, ...] = (0.01, 0.02, 0.04)
    further_rates: tuple[float, float] | None = None  # below and above: tried where the first or the last of the rates was best
    rate: float = 0.02  # of the warm start, and of the rows that choose an outer rule
    outers: tuple[tuple[float, float], ...] = ((0.7, 0.9), (0.9, 0.7), (0.7, 0.5))
    arrivals: tuple[tuple[float, float], ...] = ((0.7, 0.9), (0.9, 0.7), (0.1, 0.9))  # of the naive hub
    late: tuple[tuple[float, float], ...] = ((0.7, 0.5), (0.4, 0.9), (0.4, 0.6))  # of eager updates
    plain: tuple[tuple[float, float], ...] = ((1.0, 0.0), (0.7, 0.0), (0.5, 0.0))  # of SparseLoCo, which has no outer momentum
    islands: int = 4
    many: int = 8
    most: int = 16
    lengths: tuple[int, ...] = (50, 100, 500)
    grace_s: float = 0.5
    windows_s: tuple[float, ...] = (0, 0.5, 1, 3)
    jitter: float = 0.2
    buckets: int = 8
    dpu_warmup: int = 40  # updates, as in the paper
    evaluations: int = 12
    latency_s: float = 0.03
    mbit_per_s: float = 0.5  # of DiLoCo's rows
    hub_mbit_per_s: float = 5  # of the rows with unequal workers
    overlap_mbit_per_s: float = 3.2  # of ACCO's rows: an exchange takes about half of a batch's time
    slow_mbit_per_s: float = 0.4  # of ACCO's rows over a slow link: four times a batch's time
    exchange_mbit_per_s: float = 0.032  # of the rows with smaller exchanges: one of fp32 takes as long as a round
    fragments: int = 4
    overlaps: tuple[int, ...] = (1, 5)
    more: tuple[str, ...] = ()  # settings after all others

    def algorithm(self, method: str, outer: tuple[float, float], islands: int, length: int) -> str:
        rule = nesterov(*outer)
        delayed = f"DelayedNesterov(lr={outer[0]:g},momentum={outer[1]:g},period={islands})"
        hub = f"inner_steps={length},grace_s={self.grace_s:g}"
        return {
            ONE: "DDP()",
            LARGE: "DDP()",
            UPDATES: "DDP()",
            OVERLAPPED: f"DDP(buckets={self.buckets})",
            DILOCO: f"DiLoCo(inner_steps={length},outer={rule})",
            SYNC: f"DiLoCo(inner_steps={length},outer={rule})",
            NAIVE: f"AsyncLocalSGD({hub},outer={rule},weight=1/k)",
            BUFFER: f"AsyncLocalSGD({hub},outer=Buffered(rule={rule},size={islands}),weight=1.0)",
            DELAYED: f"AsyncLocalSGD({hub},outer={delayed},pace=given)",
            ACCO: "ACCO()",
            FREE: "ACCO(batch=free,wire=bf16)",
            ZERO: f"ZeRO1(buckets={self.buckets})",
            DPU: f"DPU(warmup={self.dpu_warmup})",
            WP: "WP()",
            FREE_DPU: f"DPU(warmup={self.dpu_warmup},batch=free,wire=bf16)",
            FREE_WP: "WP(batch=free,wire=bf16)",
            DENSE: f"DiLoCo(inner_steps={length},outer={rule})",
            STREAMING: f"Streaming(inner_steps={length},outer={rule},fragments={self.fragments},overlap={self.overlaps[0]})",
            SPARSE: f"DiLoCo(inner_steps={length},outer=SGD(lr={outer[0]:g}),codec=topk,feedback=0.95)",
            EAGER: f"Eager(inner_steps={length},outer={rule})",
            MUON: f"DiLoCo(inner_steps={length},outer={rule})",
            MUON_BATCH: "DDP()",
        }[method]

    def row(self, method: str, choice: Choice, *settings: str, islands: int = 0, length: int = 0, name: str = "") -> Row:
        """A method with its choice; `settings` come last."""
        islands, length = islands or self.islands, length or self.lengths[0]
        steps = self.steps * islands if method == UPDATES else self.steps
        if method in OVERLAPS:
            times, latency_s, mbit_per_s = "[1.0]", 0.001, self.overlap_mbit_per_s
        elif method in (SYNC, *HUB):
            times, latency_s, mbit_per_s = "very", self.latency_s, self.hub_mbit_per_s
        elif method in EXCHANGES:
            times, latency_s, mbit_per_s = "[1.0]", self.latency_s, self.exchange_mbit_per_s
        else:
            times, latency_s, mbit_per_s = "[1.0]", self.latency_s, self.mbit_per_s
        alone = method in (ONE, UPDATES)
        cuda = f"device=cuda,precision=bf16,compile=true,together={self.together}"
        fast = cuda if self.device == "cuda" else "device=cpu,precision=fp32,compile=false"
        schedule = (
            f"lr=Cosine(lr={choice.rate:g},warmup={self.warmup},floor={choice.rate / 10:g}),betas=[0.9,0.95],weight_decay=0.1"
        )
        base = (
            f"model=GPT({self.model})",
            f"data=Text(corpus='prepared:{self.text}',seq_len={self.seq_len},eval_batches={self.eval_batches})",
            f"algorithm={self.algorithm(method, choice.outer, islands, length)}",
            f"optimizer={'Muon' if method in (MUON, MUON_BATCH) else 'AdamW'}({schedule})",
            f"train=Train(steps={steps},batch_size={self.batch_size},warm_start_steps={self.warm_start},"
            f"warm_start_lr={self.rate:g},{fast})",
            f"cluster=Cluster(islands={1 if alone else islands},step_time_s={times},"
            f"link=Link(latency_s={latency_s:g},bandwidth_mbit_per_s={mbit_per_s:g}))",
            f"keep=Keep(evaluate_every={steps // self.evaluations},save_every=1000000)",
            *self.more,
        )
        return Row(recipe=RECIPES[method], base=base, settings=settings, name=name or method)

    @property
    def counts(self) -> tuple[int, int]:
        return self.islands, self.many


SMALL = Plan(
    text="",
    model="layers=2,width=32,heads=2,head_size=16",
    larger="layers=2,width=64,heads=4,head_size=16",
    further_rates=(0.005, 0.08),
)
"""Bytes and a decoder of 33,000 parameters, for CPUs. A worker reads 8.2 million tokens: 250 a parameter."""

MEDIUM = Plan(
    text="",
    device="cuda",
    together="stacked",
    model="layers=3,width=128,heads=4,head_size=32",
    larger="layers=3,width=256,heads=8,head_size=32",
    seq_len=256,
    eval_batches=32,
    rates=(0.002, 0.004, 0.008),
    further_rates=(0.001, 0.016),
    rate=0.004,
    mbit_per_s=10,
    hub_mbit_per_s=100,
    overlap_mbit_per_s=60,
    slow_mbit_per_s=7.5,
    exchange_mbit_per_s=0.6,
)
"""Bytes and a decoder of 0.6 million parameters, for one GPU."""

LARGE_SCALE = Plan(
    text="",
    device="cuda",
    model="layers=6,width=256,heads=4,head_size=64",
    larger="layers=6,width=512,heads=8,head_size=64",
    seq_len=256,
    batch_size=128,
    eval_batches=8,
    rates=(0.0005, 0.001, 0.002),
    further_rates=(0.00025, 0.004),
    rate=0.001,
    mbit_per_s=100,
    hub_mbit_per_s=1000,
    overlap_mbit_per_s=650,
    slow_mbit_per_s=80,
    exchange_mbit_per_s=6.5,
)
"""A vocabulary of 8,192 tokens and a decoder of 6.8 million parameters, for one GPU."""

QUICK = replace(
    SMALL,
    model="layers=1,width=8,heads=1,head_size=8",
    larger="layers=1,width=16,heads=2,head_size=8",
    seq_len=16,
    batch_size=2,
    eval_batches=2,
    steps=8,
    warm_start=4,
    warmup=2,
    rates=(0.01, 0.02),
    further_rates=None,
    outers=((0.7, 0.9), (0.9, 0.7)),
    arrivals=((0.7, 0.9), (0.1, 0.9)),
    islands=2,
    many=3,
    most=4,
    lengths=(2, 4, 8),
    windows_s=(0, 1),
    fragments=1,
    overlaps=(0, 1),
    dpu_warmup=1,
    evaluations=2,
)
"""A smoke test; its figures mean nothing."""


def nesterov(rate: float, momentum: float) -> str:
    return f"Nesterov(lr={rate:g},momentum={momentum:g})"


# --------------------------------------------------------------------------------------------------------------------- tables


def times_batch(islands: int) -> str:
    return f"{islands}x batch"


def times_updates(islands: int) -> str:
    return f"{islands}x updates"


def diloco(islands: int, length: int) -> str:
    return f"DiLoCo, k={islands}, H={length}"


def method_of(label: str) -> str:
    """The method whose choice a row of the tables with several seeds reuses.

    >>> method_of("DiLoCo, k=8, H=500"), method_of("8x batch"), method_of(OVERLAPPED), method_of(WP)
    ('DiLoCo', 'batch', 'batch', 'WP')
    """
    if label.endswith(("x batch", "x updates")):
        return LARGE if label.endswith("batch") else UPDATES
    if label.startswith((f"{DILOCO},", STREAMING)):
        return DILOCO
    return CHOSEN_BY.get(label, label)


def headline(plan: Plan, choices: Mapping[str, Choice]) -> list[Group]:
    """The three papers' tables with several seeds."""
    return _groups((_diloco, _hub, _overlap), plan, choices)


def one_seed(plan: Plan, choices: Mapping[str, Choice]) -> list[Group]:
    """The tables with one seed, in the order in which they run: after the headline."""
    parts = (_clusters, _islands, _drops, _starts, _outer_rules, _larger, _pruned, _windows, _slow_link, _half, _appendix)
    return _groups(parts, plan, choices)


def exchanges(plan: Plan, choices: Mapping[str, Choice]) -> list[Group]:
    """The table of methods of other papers, with several seeds. It runs last."""
    return _groups((_exchanges,), plan, choices)


def _groups(
    parts: Sequence[Callable[[Plan, Mapping[str, Choice]], Group]], plan: Plan, choices: Mapping[str, Choice]
) -> list[Group]:
    return [group for part in parts if (group := part(plan, choices)).rows]


def _rows(
    plan: Plan, choices: Mapping[str, Choice], wanted: Mapping[str, tuple[str, dict[str, int], tuple[str, ...]]]
) -> dict[str, Row]:
    """The wanted rows (method, islands and length, settings) whose methods have their choice."""
    return {
        label: plan.row(method, choices[method], *settings, **sizes, name=label)
        for label, (method, sizes, settings) in wanted.items()
        if method in choices
    }


def _diloco(plan: Plan, choices: Mapping[str, Choice]) -> Group:
    wanted: dict[str, tuple[str, dict[str, int], tuple[str, ...]]] = {ONE: (ONE, {}, ())}
    for islands in plan.counts:
        wanted[times_batch(islands)] = (LARGE, {"islands": islands}, ())
        wanted[times_updates(islands)] = (UPDATES, {"islands": islands}, ())
        wanted |= {diloco(islands, length): (DILOCO, {"islands": islands, "length": length}, ()) for length in plan.lengths}
    rows = _rows(plan, choices, wanted)
    against = {label: times_batch(islands) for islands in plan.counts for label in rows if f"k={islands}," in label}
    against |= {times_updates(islands): times_batch(islands) for islands in plan.counts}
    against |= {times_batch(islands): ONE for islands in plan.counts}
    return Group(name="diloco", title="DiLoCo", note="", rows=rows, against=against, timed=against)


def _hub(plan: Plan, choices: Mapping[str, Choice]) -> Group:
    rows = _rows(plan, choices, {method: (method, {}, ()) for method in (SYNC, *HUB)})
    against = dict.fromkeys(rows, SYNC)
    return Group(name="async", title="Asynchronous Local-SGD", note="", rows=rows, against=against, timed=against)


def _overlap(plan: Plan, choices: Mapping[str, Choice]) -> Group:
    rows = _rows(plan, choices, {method: (method, {}, ()) for method in (OVERLAPPED, ZERO, ACCO, DPU, WP)})
    against = dict.fromkeys(rows, OVERLAPPED)
    return Group(name="acco", title="ACCO", note="", rows=rows, against=against, timed=against)


def streaming(overlap: int, codec: str = "fp32") -> str:
    return f"{STREAMING}, overlap {overlap}" + ("" if codec == "fp32" else f", {codec}")


def _exchanges(plan: Plan, choices: Mapping[str, Choice]) -> Group:
    codec, feedback = "algorithm.codec={}".format, "algorithm.feedback={}".format
    last = f"algorithm.overlap={plan.overlaps[-1]}"
    wanted: dict[str, tuple[str, dict[str, int], tuple[str, ...]]] = {DENSE: (DENSE, {}, ())}
    wanted |= {streaming(overlap): (STREAMING, {}, (f"algorithm.overlap={overlap}",)) for overlap in plan.overlaps}
    wanted |= {streaming(plan.overlaps[-1], name): (STREAMING, {}, (last, codec(name))) for name in ("int4", "fp4")}
    wanted |= {f"DiLoCo, {name}": (DENSE, {}, (codec(name),)) for name in ("int8", "int4", "int2", "topk")}
    wanted |= {f"DiLoCo, {name}, no feedback": (DENSE, {}, (codec(name), feedback(0))) for name in ("int2", "topk")}
    wanted |= {method: (method, {}, ()) for method in (SPARSE, MUON, MUON_BATCH, EAGER)}
    rows = _rows(plan, choices, wanted)
    against = dict.fromkeys(rows, DENSE)
    return Group(name="exchanges", title="Smaller exchanges, and Muon", note="", rows=rows, against=against, timed=against)


def _variants(
    plan: Plan,
    choices: Mapping[str, Choice],
    name: str,
    title: str,
    variants: Mapping[str, tuple[str, tuple[str, ...]]],
    against: Mapping[str, str] | None = None,
    note: str = "",
) -> Group:
    """Rows that are a method with further settings, compared with DiLoCo unless `against` names other rows."""
    rows = _rows(plan, choices, {label: (method, {}, settings) for label, (method, settings) in variants.items()})
    compared = dict.fromkeys(rows, diloco(plan.islands, plan.lengths[0])) if against is None else dict(against)
    return Group(name=name, title=title, note=note, rows=rows, against=compared, timed=compared)


def _windows(plan: Plan, choices: Mapping[str, Choice]) -> Group:
    jitter, alone = f"cluster.step_time_jitter={plan.jitter:g}", f"{SYNC}, jitter"
    variants: dict[str, tuple[str, tuple[str, ...]]] = {alone: (SYNC, (jitter,))}
    variants |= {
        f"{method}, window {grace_s:g} s": (method, (jitter, f"algorithm.grace_s={grace_s:g}"))
        for method in (DELAYED, BUFFER, NAIVE)
        for grace_s in plan.windows_s
    }
    return _variants(plan, choices, "windows", "Grace windows, with jitter of step times", variants, dict.fromkeys(variants, alone))


SLOW_LINK = (OVERLAPPED, ZERO, ACCO, FREE, FREE_DPU, FREE_WP)
SLOW_WORKER = (OVERLAPPED, ZERO, ACCO, FREE)


def on_slow_link(method: str) -> str:
    return f"{method}, slow link"


def with_slow_worker(method: str) -> str:
    return f"{method}, slow worker"


def _slow_link(plan: Plan, choices: Mapping[str, Choice]) -> Group:
    slow, worker = f"cluster.link.bandwidth_mbit_per_s={plan.slow_mbit_per_s:g}", "cluster.step_time_s=[1.0,1.0,1.0,4.0]"
    variants: dict[str, tuple[str, tuple[str, ...]]] = {FREE: (FREE, ())}
    variants |= {on_slow_link(method): (method, (slow,)) for method in SLOW_LINK}
    variants |= {with_slow_worker(method): (method, (worker,)) for method in SLOW_WORKER}
    against = {label: f"{OVERLAPPED},{label.rpartition(',')[2]}" for label in variants} | {FREE: OVERLAPPED}
    title = "ACCO with a free batch, over a slow link, and with a slow worker"
    note = (
        "A free batch grows only where an exchange outlasts it. Over the link of ACCO's other rows it does not: there the free "
        "batch makes as many commits of as many tokens as the fixed one, so the row without a slow link shows bf16 alone."
    )
    return _variants(plan, choices, "slow", title, variants, against, note)


_SHARDS = ("data.partition=KMeans()", "algorithm.weighting=examples")
"""Islands with k-means shards weigh by their shards' examples, as in the paper."""


def _clusters(plan: Plan, choices: Mapping[str, Choice]) -> Group:
    return _variants(plan, choices, "clusters", "k-means shards", {"k-means shards": (DILOCO, _SHARDS)})


def _drops(plan: Plan, choices: Mapping[str, Choice]) -> Group:
    dropped = "cluster.drop_probability={}".format
    variants = {
        f"k-means shards, {share:.0%} of the deltas lost": (DILOCO, (*_SHARDS, dropped(share))) for share in (0.1, 0.3, 0.5)
    }
    variants["half of the deltas lost"] = (DILOCO, (dropped(0.5),))
    return _variants(plan, choices, "drops", "Lost deltas", variants)


def _outer_rules(plan: Plan, choices: Mapping[str, Choice]) -> Group:
    rules = {"SGD": "SGD(lr=1.0)", "SGDM": "Momentum(lr=0.3,momentum=0.9)", "Adam": "Adam(lr=0.3,betas=[0.9,0.95],eps=0.1)"}
    variants = {f"outer {name}": (DILOCO, (f"algorithm.outer={rule}",)) for name, rule in rules.items()}
    others = [rule for rule in plan.outers if DILOCO in choices and rule != choices[DILOCO].outer]
    variants |= {f"outer {nesterov(*rule)}": (DILOCO, (f"algorithm.outer={nesterov(*rule)}",)) for rule in others}
    return _variants(plan, choices, "outer", "Outer rules", variants)


def _starts(plan: Plan, choices: Mapping[str, Choice]) -> Group:
    total = plan.steps + plan.warm_start
    variants = {
        f"warm start of {warm} of {total} steps": (DILOCO, (f"train.warm_start_steps={warm}", f"train.steps={total - warm}"))
        for warm in (0, plan.warm_start // 2, 2 * plan.warm_start)
    }
    return _variants(plan, choices, "starts", "Length of the warm start, at the same number of steps", variants)


def _pruned(plan: Plan, choices: Mapping[str, Choice]) -> Group:
    variants = {f"{share:.0%} pruned": (DILOCO, (f"algorithm.pruned={share:g}",)) for share in (0.25, 0.5, 0.75)}
    return _variants(plan, choices, "pruned", "Pruned deltas", variants)


def _appendix(plan: Plan, choices: Mapping[str, Choice]) -> Group:
    variants = {
        "averaged moments": (DILOCO, ("algorithm.moments=averaged",)),
        "disjoint merge": (DILOCO, ("algorithm.merge=disjoint",)),
    }
    return _variants(plan, choices, "appendix", "DiLoCo's appendix", variants)


def _islands(plan: Plan, choices: Mapping[str, Choice]) -> Group:
    wanted = {
        times_batch(plan.most): (LARGE, {"islands": plan.most}, ()),
        diloco(plan.most, plan.lengths[0]): (DILOCO, {"islands": plan.most}, ()),
        "one island with an outer rule": (DILOCO, {"islands": 1}, ()),
    }
    against = {diloco(plan.most, plan.lengths[0]): times_batch(plan.most), "one island with an outer rule": ONE}
    rows = _rows(plan, choices, wanted)
    return Group(name="islands", title="More islands, and one", note="", rows=rows, against=against, timed=against)


def _half(plan: Plan, choices: Mapping[str, Choice]) -> Group:
    half = (f"train.steps={plan.steps // 2}",)
    variants = {f"{method}, half of the steps": (method, half) for method in (ONE, LARGE, DILOCO)}
    against = dict.fromkeys(variants, f"{LARGE}, half of the steps")
    return _variants(plan, choices, "half", "Half of the steps", variants, against)


def _larger(plan: Plan, choices: Mapping[str, Choice]) -> Group:
    model = (f"model=GPT({plan.larger})",)
    variants = {f"{method}, larger model": (method, model) for method in (ONE, LARGE, DILOCO)}
    against = dict.fromkeys(variants, f"{LARGE}, larger model")
    return _variants(plan, choices, "larger", "A larger model", variants, against)


CHOICES = "choices"
_ORDER = (
    "diloco",
    "async",
    "acco",
    "clusters",
    "islands",
    "drops",
    "starts",
    "outer",
    "larger",
    "pruned",
    "windows",
    "slow",
    "half",
)
TABLES = (CHOICES, *_ORDER, "appendix", "exchanges")
"""The names of all tables, in the order in which their cells run; those of other papers' methods choose before `exchanges`."""

PLANS = {"small": SMALL, "medium": MEDIUM, "large": LARGE_SCALE}
