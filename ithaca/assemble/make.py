"""`apply`: a model onto the ranks of a mesh.

The order is fixed: modules without memory, then FSDP2, then this rank's shards from the source. Parallelism is applied
here and nowhere else.
"""

from ithaca.assemble.model import Model, Substitutes
from ithaca.base.errors import ModelError, PlanError
from ithaca.base.misuse import check_type
from ithaca.model.source import ModelSource
from ithaca.model.spec import Spec
from ithaca.parallel.agree import same_everywhere, together, together_with
from ithaca.parallel.mesh import Mesh, alone
from ithaca.parallel.sharding import load
from ithaca.plans.plan import Plan


def apply(source: ModelSource, plan: Plan, mesh: Mesh | None = None, substitutes: Substitutes | None = None) -> Model:
    """Put a named model onto the ranks of a mesh (None: this process alone) and read its weights. Collective.

    `substitutes` are for rehearsals alone.
    """
    mesh = alone() if mesh is None else mesh
    check_type(
        mesh, Mesh, PlanError, "apply takes a mesh third: ithaca.mesh(ulysses=8), or none for this process alone"
    )
    together(mesh.group, lambda: _check_arguments(source, plan))
    same_everywhere(mesh.group, "model or Plan", (source.spec, source.dtype, source.weights.identity(), plan))
    _check_axes(source.spec, plan, mesh)
    model, kernels = together_with(
        mesh.group, lambda: Model(source, plan, mesh, substitutes or Substitutes()), lambda model: model.kernel.name
    )
    # `auto` looks at the packages and the GPU of each rank
    for rank, kernel in enumerate(kernels):
        if kernel != kernels[0]:
            raise PlanError(
                f"rank {rank} would attend with kernel '{kernel}' and rank 0 with '{kernels[0]}': set plan.kernel to "
                "one that runs on every rank (where it cannot, the error says why)"
            )
    together(mesh.group, lambda: load(model.decoder, mesh, model.part, source.weights))
    return model


def _check_axes(spec: Spec, plan: Plan, mesh: Mesh) -> None:
    """Raise an error if a recipe cannot share a sequence over the ranks of this mesh."""
    ranks = mesh.context_ranks
    if mesh.tensor > 1 and not plan.entry.tensor:
        to = f"ulysses to {mesh.tensor}" if plan.entry.ulysses else f"shard to {mesh.shard * mesh.tensor}"
        raise PlanError(
            f"recipe '{plan.recipe}' holds whole weights, but the mesh has tensor {mesh.tensor}: set tensor to 1 and "
            f"{to}, or use recipe 'tensor'"
        )
    if mesh.ulysses > 1 and plan.entry.tensor:
        raise PlanError(
            f"recipe '{plan.recipe}' divides heads among tensor ranks, but the mesh has ulysses {mesh.ulysses}: set "
            f"ulysses to 1 and tensor to {mesh.ulysses}, or use recipe 'sweep'"
        )
    if ranks > 1 and not plan.shares:
        raise PlanError(
            f"recipe '{plan.recipe}' has no context parallelism, but the mesh has ulysses {mesh.ulysses} × ring "
            f"{mesh.ring}: set both to 1 and shard to {mesh.shard * ranks}, or use recipe 'sweep'"
        )
    if mesh.ulysses > 1 and not plan.entry.ulysses:
        raise PlanError(
            f"recipe '{plan.recipe}' shares a sequence over ring ranks only, but the mesh has ulysses {mesh.ulysses}: "
            f"set ulysses to 1 and ring to {ranks}, or use recipe 'hybrid'"
        )
    if mesh.ring > 1 and not plan.entry.ring:
        by_heads = f"set ring to 1 and ulysses to {ranks}, or " * (ranks <= spec.heads)
        raise PlanError(
            f"recipe '{plan.recipe}' shares a sequence by heads only, but the mesh has ring {mesh.ring}: "
            f"{by_heads}use recipe 'sweep'"
        )


def _check_arguments(source: object, plan: object) -> None:
    loaded = "apply takes a loaded model first: ithaca.load_model(folder)"
    check_type(source, ModelSource, ModelError, f"{loaded} of a Hugging Face folder or a preset")
    check_type(plan, Plan, PlanError, "apply takes a Plan second: ithaca.Plan(recipe='sweep')")
