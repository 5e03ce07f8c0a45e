"""The world of the micro benchmarks: generators of problems, and drafts for the micro models.

`python -m micro_world.ship`, in nbs/labs, writes the problems that the package ships. Nothing in
the library needs this folder.
"""
