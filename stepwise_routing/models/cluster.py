"""Copies of a model on many machines or GPUs, by Ray. A draw does not depend on the copy that makes it."""


class Copy:
    "A model in a process of its own."

    def __init__(self, open_model):
        self.model = open_model()

    def facts(self) -> tuple:
        model = self.model
        return model.spec, model.index, model.has_step_seeds, model.settings()

    def call(self, method: str, part, *more) -> list:
        return getattr(self.model, method)(part, *more)


class Cluster:
    "A `Model` whose lists are shared out to copies."

    def __init__(
        self,
        open_model,  # () -> model; it runs on each worker
        copies: int = 2,
        part: int = 64,  # requests that a copy gets at once
        **resources,  # of a copy, such as num_gpus=1
    ):
        import ray
        from ray.util import ActorPool

        ray.init(ignore_reinit_error=True, include_dashboard=False)  # or the cluster at RAY_ADDRESS
        actor = ray.remote(**dict(num_cpus=1) | resources)(Copy)
        actors = [actor.remote(open_model) for _ in range(copies)]
        facts = ray.get(actors[0].facts.remote())
        self.spec, self.index, self.has_step_seeds, self.of_copy = facts
        self.pool = ActorPool(actors)
        self.part = part

    def settings(self) -> dict:
        return self.of_copy

    def share(self, method: str, items, *more) -> list:
        parts = [items[i : i + self.part] for i in range(0, len(items), self.part)]
        done = self.pool.map(lambda actor, part: actor.call.remote(method, part, *more), parts)
        return [result for part in done for result in part]

    def write(self, requests) -> list:
        return self.share('write', requests)

    def score(self, requests) -> list:
        return self.share('score', requests)

    def choose(self, conversations, options) -> list:
        return self.share('choose', conversations, options)
