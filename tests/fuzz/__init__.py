"""Random cases against references: `make fuzz` for as long as asked, a fixed handful in tests/test_fuzz.py.

A kind of case is a module with `draw(rng)`, a random case, and `check(case)`, which runs it and raises a
`Deviation`, or whatever was raised, where it does not hold. It may have `prepare()`, for what all its cases
need and what no case's time limit is for. A case is plain data, so that one that fails is a
line of JSON: with `--case` it runs again, in `cases.jsonl` it is tried in every run of the tests."""

KINDS = (
    *("stacks", "distributions", "operators", "wrapped", "losses", "adapters", "recurrences", "ranks"),
    *("chats", "damage", "prefixes", "caches", "modes", "exports"),
)
