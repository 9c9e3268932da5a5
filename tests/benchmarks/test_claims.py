"""Verdicts on claims."""


def outcome(b, *losses, tokens=100):
    summaries = [{"val_loss": loss, "tokens": tokens, "warm_start_tokens": 0} for loss in losses]
    return b.cells.Outcome(b.cells.Row(recipe="demo-ddp"), tuple(summaries))


def test_claims_are_judged_by_the_cells(b):
    claim = b.claims.Claim(text="A ends below B.", terms=((1.0, "A"), (-1.0, "B")), below=0.0)
    low, high = outcome(b, 1.0, 2.0, 3.0), outcome(b, 1.2, 2.3, 3.2)
    lines = [b.claims.claim_line(claim, {"A": one, "B": two}) for one, two in ((low, high), (high, low), (low, low))]
    assert [line.split("**")[1] for line in lines] == ["holds here", "does not hold here", "holds here"]
    noisy = outcome(b, 3.0, 2.0, 1.0)
    assert "within the spread" in b.claims.claim_line(claim, {"A": noisy, "B": high})
    assert "no verdict" in b.claims.claim_line(claim, {"A": outcome(b, 1.0), "B": outcome(b, 2.0)})
    assert b.claims.claim_line(claim, {"A": low}) is None
    alone = {"A": outcome(b, 1.0), "B": outcome(b, 2.0)}
    for std, verdict in ((0.1, "holds here"), (1.0, "within the spread")):
        assert f"**{verdict}** (one seed): A ends below B." in b.claims.claim_line(claim, alone, b.seed_statistics.Scatter(std, 4))
    assert "no verdict" in b.claims.claim_line(b.claims.without_scatter(claim), alone, b.seed_statistics.Scatter(0.1, 4)), (
        "the scatter is of other rows"
    )


def test_claims_about_rows_with_unequal_starts_are_marked(b):
    def row(*first):
        """A row whose seeds start from these losses."""
        summaries = tuple({"val_loss": 1.0 + seed} for seed in range(len(first)))
        return b.cells.Outcome(
            b.cells.Row(recipe="demo-ddp"), summaries, curves=tuple(((0.0, 0, at), (9.0, 9, 1.0)) for at in first)
        )

    def section(one, two):
        return b.claims.claims_section([claim], {"A": one, "B": two}, b.seed_statistics.Scatter(0.1, 4))

    claim = b.claims.lower("A ends below B.", "A", "B")
    for one, two, mark in [
        (row(5.0), row(5.0), " (one seed)"),
        (row(5.0), row(5.1), " (one seed, unequal start)"),
        (row(5.0), row(5.0, 5.1, 5.2), " (one seed)"),
        (row(5.0, 5.1), row(5.0, 5.1), ""),
        (row(5.0, 5.1), row(5.0, 5.2), " (unequal start)"),  # in the second seed
        (row(5.0, 5.1), row(5.0, 5.1, 5.2), ""),
        (row(5.0, 5.1), outcome(b, 1.0, 2.0), ""),  # without curves
    ]:
        text = section(one, two)
        assert f"**{mark}: A ends" in text
        assert ("Unequal start: " in text) == ("unequal start" in mark)


def test_a_verdict_has_the_ratio_of_tokens(b):
    group = b.ablations.Group(name="x", title="x", note="x", rows={})
    outcomes = {"default": outcome(b, 1.0, 1.1), "same": outcome(b, 2.0, 2.1), "more": outcome(b, 2.0, 2.1, tokens=200)}
    verdicts = {label: b.ablations.compared(group, label, outcomes)[2] for label in outcomes}
    assert verdicts == {"default": "-", "same": "higher", "more": "higher, at ×2 tokens"}


def test_a_claim_about_a_larger_batch_is_judged_only_where_that_batch_gains_little(b):
    claim = b.claims.lower("A ends below the batch.", "A", "batch", ("one worker", "batch"))
    rows = {"A": outcome(b, 1.0, 1.1, 1.2), "batch": outcome(b, 1.1, 1.2, 1.3)}
    for alone, shown, reason in (
        (1.2, "**holds here**: A ends", None),
        (1.26, "**not judged here**: A ends", "; batch gains 0.160 nats over one worker, more than 0.15."),
        (None, "**not judged here**: A ends", "; the gain of batch over one worker was not measured."),
    ):
        others = {} if alone is None else {"one worker": outcome(b, alone, alone + 0.1, alone + 0.2)}
        section = b.claims.claims_section([claim], rows | others)
        assert shown in section
        assert reason is None or reason in section
        assert ("A claim about a larger batch is judged only where" in section) == (reason is not None)
