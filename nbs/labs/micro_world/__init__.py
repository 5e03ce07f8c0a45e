"""The world of the micro benchmarks: generators of problems, and what the micro models learn from.

`python -m micro_world.ship`, in nbs/labs, writes the problems that the package ships. Nothing in
the library needs this folder.
"""
