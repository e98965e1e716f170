"""How a row is measured: its longest context and a timed step there, or memory and time at one length.

**Longest.** Predicted, then bracketed by memory-only rehearsals (bracket.py). A length that the node's host memory or
disk cannot hold is refused by arithmetic: the rehearsal counts those bytes and holds none.

**Time.** A rehearsal has few layers. Steps of n and of n / 2 layers are timed; their difference is what n / 2 layers
take, and a step of all layers is the step of n with the missing ones added. A step of n that takes longer than two of
n / 2 is timed again, and the fastest counts (child.py). Embedding, loss and optimizer are in it,
links between GPUs are not: `links_seconds_predicted` is what the planner adds for them.
"""

from typing import Any, Protocol

from ithaca.bench.bracket import PERCENT, Bracket, bracket
from ithaca.bench.predict import Place, Prediction
from ithaca.bench.rows import Limits, Options, Row
from ithaca.model.spec import Spec
from ithaca.schedule.step_memory import step_memory

Json = dict[str, Any]
NO_FURTHER = "not reached"  # the limit of a context that is as long as the longest to look at
SHORT_STEP = 0.5  # seconds: shorter steps are timed REPEATS times, with more layers
REPEATS, MORE_LAYERS = 5, 4
LONG_STEP = 4.0  # seconds of the layers that run: beyond, memory is rehearsed without attention
SIZES = ("peak_bytes", "peak_bytes_predicted", "host_bytes", "disk_bytes", "kernel")


class Measures(Protocol):
    """Something that answers requests (ask.py)."""

    def __call__(self, request: Json) -> Json: ...


def _axes(prediction: Prediction) -> Json:
    return prediction.axes.grid


def _request(kind: str, model: str, prediction: Prediction, tokens: int, layers: int, **more: Any) -> Json:
    return {
        "kind": kind,
        "model": model,
        "plan": dict(prediction.options),
        "axes": _axes(prediction),
        "tokens": tokens,
        "layers": layers,
        "cap": prediction.limits.cap,
        **more,
    }


class Measured:
    """One row on one machine."""

    def __init__(self, model: str, spec: Spec, row: Row, limits: Limits, place: Place, peak_at: int | None = None):
        self.model, self.spec, self.row, self.limits, self.place = model, spec, row, limits, place
        self.layers = min(row.layers, spec.layers)
        self.peak_at = peak_at  # tokens at which memory is asked for as well

    def prediction(self, options: Options) -> Prediction:
        return Prediction(self.spec, options, self.row.axes(self.limits.ranks), self.limits, self.place)

    # The longest context
    def predict_longest(self) -> Json:
        """The predicted longest context, its memory and its speed."""
        prediction = self.prediction(self.row.plans[0])
        tokens = prediction.longest()
        if not tokens:
            return {"longest": 0, **prediction.why_not(self.place.shortest)}
        more = prediction.limit(min(round(1.05 * tokens), self.limits.most + 1))
        found: Json = {"longest": tokens, "limit": NO_FURTHER if tokens >= self.limits.most else more}
        found |= {"peak_bytes": prediction.device_bytes(step_memory(prediction.job(tokens)))}
        if self.peak_at and tokens >= self.peak_at:
            found["peak_at"] = [self.peak_at, prediction.device_bytes(step_memory(prediction.job(self.peak_at)))]
        return found | (self._predicted_speed(prediction, min(tokens, self.limits.timed)) if self.limits.timed else {})

    def measure_longest(self, ask: Measures) -> Json:
        """The bracket, the peak at the length that fits, and the time of a step."""
        prediction = self.prediction(self.row.plans[0])
        reports: dict[int, Json] = {}

        def fits(tokens: int) -> bool:
            beyond = prediction.beyond(step_memory(prediction.job(tokens)))
            if beyond:
                reports[tokens] = {"fits": False, "limit": beyond}
            else:
                reports[tokens] = ask(self._memory_request(prediction, tokens))
            return reports[tokens]["fits"]

        found = bracket(prediction.longest(), fits, self.place.shortest, self.limits.most)
        answer = self._bracketed(found, reports)
        if self.peak_at and found.fits >= self.peak_at:
            fits(self.peak_at)
            answer["peak_at"] = [self.peak_at, reports[self.peak_at]["peak_bytes"]]
        if found.fits and self.limits.timed:
            answer |= self._timed(ask, prediction, min(found.fits, self.limits.timed), hold=False)
        return answer

    def _bracketed(self, found: Bracket, reports: dict[int, Json]) -> Json:
        answer = {
            "longest": found.fits,
            "fails": found.fails,
            "predicted": found.predicted,
            "percent": PERCENT,
            "limit": NO_FURTHER if found.fails is None else reports[found.fails].get("limit", "GPU"),
            "tries": {str(tokens): report["fits"] for tokens, report in sorted(reports.items())},
        }
        return answer | {name: reports[found.fits][name] for name in SIZES if found.fits}

    def _memory_request(self, prediction: Prediction, tokens: int) -> Json:
        """A request that names the kernel that the machine runs, so that its package need not be loaded again."""
        request = _request("memory", self.model, prediction, tokens, self.layers)
        return request | {"plan": ({"kernel": self.place.kernel} if self.place.kernel else {}) | request["plan"]}

    # One length
    def predict_at(self, tokens: int) -> Json:
        """The predicted memory and speed of the first Plan that fits."""
        for options in self.row.plans:
            prediction = self.prediction(options)
            if prediction.limit(tokens) is None:
                peak = prediction.device_bytes(step_memory(prediction.job(tokens)))
                found = {"fits": True, "tokens": tokens, "plan": dict(options), "peak_bytes": peak}
                return found | self._predicted_speed(prediction, tokens)
        last = self.prediction(self.row.plans[-1])
        return {"fits": False, "tokens": tokens, "plan": dict(self.row.plans[-1]), "limit": last.limit(tokens)}

    def measure_at(self, ask: Measures, tokens: int) -> Json:
        """Memory and time of the first Plan that fits: from the first that is predicted to, the last if none is."""
        predicted = [self.prediction(options).limit(tokens) is None for options in self.row.plans]
        first = predicted.index(True) if any(predicted) else len(predicted) - 1
        answer: Json = {}
        for options in self.row.plans[first:]:
            prediction = self.prediction(options)
            if beyond := prediction.beyond(step_memory(prediction.job(tokens))):
                answer = {"fits": False, "limit": beyond}
            else:
                answer = self._at(ask, prediction, tokens)
            answer |= {"tokens": tokens, "plan": dict(options)}
            if answer["fits"]:
                break
        return answer

    def _at(self, ask: Measures, prediction: Prediction, tokens: int) -> Json:
        """Memory and time in one measurement; in two if steps are long, since watching slows a step down."""
        if (prediction.seconds(tokens, links=False) or 0) * self.layers / self.spec.layers < LONG_STEP:
            return self._timed(ask, prediction, tokens, hold=True)
        found = ask(self._memory_request(prediction, tokens))
        if not found["fits"]:
            return {"fits": False, "limit": "GPU", "peak_bytes_predicted": found["peak_bytes_predicted"]}
        return {name: found[name] for name in SIZES} | self._timed(ask, prediction, tokens, hold=False)

    # Time
    def _predicted_speed(self, prediction: Prediction, tokens: int) -> Json:
        seconds = prediction.seconds(tokens, links=True)
        return {"timed": tokens, **prediction.speed(tokens, seconds)} if seconds else {"timed": tokens}

    def _timed(self, ask: Measures, prediction: Prediction, tokens: int, hold: bool) -> Json:
        """A step of all layers, from timed steps of a few."""
        layers, repeats = self._effort(prediction, tokens)
        found = ask(_request("time", self.model, prediction, tokens, layers, hold=hold, repeats=repeats))
        if not found["fits"]:
            return {"fits": False, "limit": "GPU", "peak_bytes_predicted": found.get("peak_bytes_predicted")}
        layer = (found["seconds"] - found["fewer_seconds"]) / (found["layers"] - found["fewer_layers"])
        if layer <= 0:  # noise is larger than a layer
            layer = found["seconds"] / found["layers"]
        seconds = found["seconds"] + (self.spec.layers - found["layers"]) * layer
        links, here = (prediction.seconds(tokens, links) for links in (True, False))
        names = SIZES if hold else ()
        return {
            "fits": True,
            "timed": tokens,
            "layers_timed": [found["fewer_layers"], found["layers"]],
            "seconds_timed": [found["fewer_seconds"], found["seconds"]],
            "seconds_tried": found["seconds_tried"],
            "layer_seconds": layer,
            **prediction.speed(tokens, seconds),
            "seconds_predicted": here,
            "links_seconds_predicted": max(links - here, 0.0) if links and here else None,
            **{name: found[name] for name in names},
        }

    def _effort(self, prediction: Prediction, tokens: int) -> tuple[int, int]:
        """Layers to time and how often: more where a step is short."""
        if self.place.on_cpu:
            return self.layers, 1
        whole = prediction.seconds(tokens, links=False)
        if whole is None or whole * self.layers / self.spec.layers > SHORT_STEP:
            return self.layers, 1
        return min(MORE_LAYERS * self.layers, self.spec.layers // 2 * 2 or 1), REPEATS
