"""Steps of a stage of a pipeline: called, not recorded, as stages wait for each other in them."""

from __future__ import annotations

from msgspec.structs import replace

from headrace.back.kernels.native.library import loaded
from headrace.back.runner.batch import StepShape
from headrace.back.runner.buckets import BucketSteps
from headrace.back.runner.cpu_graphs import CpuGraphs, ExactSizes
from headrace.back.runner.devices import bucket_steps, exact_steps, why_exact
from headrace.back.runner.results import AwaitMasks, StepTensors
from headrace.back.runner.sizes import Bucket
from headrace.back.runner.steps import StepResources, Steps
from headrace.back.runner.unrecorded import Unrecorded
from headrace.back.sampling.in_step import SamplerInput
from headrace.base.config.resolved import EngineSpec
from headrace.base.wire.step import StepPlan

_WHY = "stages of a pipeline wait for each other within their steps"


def make_stage_steps(
    resources: StepResources, spec: EngineSpec, *, num_groups: int, is_last: bool
) -> Steps:
    """Of a stage of a pipeline: nothing is recorded."""
    why = why_exact(resources)
    if why is None and resources.device.type != "cpu":
        why = _WHY
    if why is not None:
        return exact_steps(resources, spec, why, num_groups=num_groups)
    return bucket_steps(
        resources,
        spec,
        Unrecorded(CpuGraphs(loaded()), _WHY),
        num_groups=num_groups,
        sizes=ExactSizes,
        kind=StageSteps if is_last else ForwardSteps,
    )


class StageSteps(BucketSteps):
    """Steps whose drafts are proposed in front of them on every stage alike: rows that wait for
    masks, which the last stage alone has, draft nothing."""

    def begin(self, plan: StepPlan, needs: SamplerInput, masks: AwaitMasks) -> StepPlan:
        """See Steps."""
        begun = super().begin(replace(plan, deferred=()), needs, masks)
        return replace(begun, deferred=plan.deferred)

    def finish(self, plan: StepPlan, shape: StepShape) -> None:
        """See Steps."""


class ForwardSteps(StageSteps):
    """Steps that end with the layers: of stages behind which there are others."""

    def _step(self, bucket: Bucket) -> StepTensors:
        frame, state = self._frame_of(bucket), self._resources.state
        self._inputs(self._message.words, self._tables, frame.out)
        state.before(frame.batch)
        hidden_TE = self._resources.model.forward(frame.batch)
        state.after(frame.batch, hidden_TE)
        return StepTensors(hidden_TE=hidden_TE)
