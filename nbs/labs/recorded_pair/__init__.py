"""How the real pair was recorded: two language models, every prefix of every chain.

It is no part of the package. The notebook 02_recorded tells the story, the README how to do it again.
"""
