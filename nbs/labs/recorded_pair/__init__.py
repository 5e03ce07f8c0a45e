"""How the recorded outcomes were drawn: two real language models, behind vLLM servers or opened from folders,
and every prefix of every chain.

It is no part of the package. The notebook 02_recorded tells the story; `python -m recorded_pair.draw` and
`python -m recorded_pair.record`, in nbs/labs, do it again. `recorded_pair.judge` draws what SpecReason needs.
"""
