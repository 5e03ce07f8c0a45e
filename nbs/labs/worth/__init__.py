"""When is a policy worth having? Twelve cells of newly generated problems: hopeless share times noise of the score.

It is no part of the package. The notebook 03_when_worth tells the story; `python -m worth`, in nbs/labs, does it again.
"""
