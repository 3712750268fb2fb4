"""Networks of published experiments, counted by hand; `write` packages them."""
