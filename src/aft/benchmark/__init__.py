"""How long the operations take, and whether they are right: what `aft bench` and benchmarks/ share."""
