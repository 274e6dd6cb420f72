"""HybridDeviceOptimizer: one torch optimizer that computes on two sides, host and device.

A torch optimizer updates the device's pieces. The host keeps masters and states of the others and updates them in
buckets by the tile kernels, while the device computes. README.md in this folder draws the schedule.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rayzero.errors import ConfigError, UnsupportedError
from rayzero.hybrid.gate import AwayParameter, Gate, attach
from rayzero.hybrid.host_side import BucketRun, gradient_of
from rayzero.hybrid.placement import (
    FractionSearch,
    HyperLink,
    OptimizerClass,
    Order,
    Placement,
    Targets,
    defaults,
    fitting,
    the_device,
)
from rayzero.hybrid.sides import Builder, Sides
from rayzero.kernels import choose_kernel
from rayzero.kernels.optimizer_class import State, options_of
from rayzero.lanes import Lane
from rayzero.modes import outside_modes

InBackward = Literal["nothing", "send", "step"]


class HybridDeviceOptimizer(torch.optim.Optimizer):
    """Updates some of the parameters in host memory, the others on the device.

    Weights and states equal those of ``gpu_optimizer_cls`` alone, for any fraction, overlap setting and order in which
    gradients arrive; bit for bit where both sides round alike (on a CPU: torch's fused Adam and AdamW, and element-wise
    classes). Only one thread may use it at a time."""

    _step_supports_amp_scaling = True  # for torch.amp.GradScaler: step() unscales, and skips if found_inf is set

    def __init__(
        self,
        params: Any,
        offload_fraction: float | Literal["measured"] = 0.5,
        cpu_optimizer_cls: OptimizerClass | None = None,
        gpu_optimizer_cls: OptimizerClass | None = None,
        param_update_in_fp32: bool = False,
        pin_cpu_grads: bool = True,
        pin_cpu_params: bool = True,
        overlap_cpu_optimizer_d2h_h2d: bool = True,
        *,
        device_memory_budget: int | None = None,
        in_backward: InBackward = "send",
        return_in_forward: bool = True,
        offload_order: Order = "first",
        bucket_bytes: int = 16 << 20,
        kernel: str = "auto",
        lane: Lane | None = None,
        **kwargs: Any,
    ) -> None:
        """params: parameters or groups, as for any torch optimizer; on one device, or on it and the CPU (the host
        updates those).
        offload_fraction: share of the parameters' bytes that the host updates, in [0, 1], exact to 64 elements;
            "measured": starts at 0.5 and follows, while training, how much hides behind the computation.
        cpu_optimizer_cls, gpu_optimizer_cls: torch optimizer classes; None means the same as the other one; by default
            both are AdamW. On the host, the tile kernels compute Adam and AdamW. If a class is not element-wise, no
            parameter is cut.
        param_update_in_fp32: 16-bit parameters have fp32 masters, on both sides.
        pin_cpu_grads, pin_cpu_params: page-lock the host memory that CUDA copies from and to.
        overlap_cpu_optimizer_d2h_h2d: copy and update on threads and streams; False: do all of it inside step().
        device_memory_budget: bytes of masters and states that may stay on the device; if they do not fit, more is
            offloaded.
        in_backward: "send": copy gradients as backward makes them; "step": also update their buckets then (without
            clipping, scaling or accumulation); "nothing": leave all of it to step().
        return_in_forward: the first use of a parameter waits for its update; False: step() waits for all.
        offload_order: "first" or "last": which end of the parameters to offload.
        bucket_bytes: bytes of parameters that are copied and updated together. kernel: see ``rayzero.kernels``.
        lane: what copies, for tests and other devices. kwargs: the classes' options (lr, betas, ...).

        Raises ConfigError for a setting out of range, UnsupportedError naming a parameter or class that cannot be
        offloaded, TypeError for an unknown option."""
        self._measured = offload_fraction == "measured"
        if isinstance(offload_fraction, str) and not self._measured:
            raise ConfigError(f'offload_fraction must be in [0, 1] or "measured", got {offload_fraction!r}')
        if in_backward not in ("nothing", "send", "step"):
            raise ConfigError(f'in_backward must be "nothing", "send" or "step", got {in_backward!r}')
        self._targets = Targets(
            fraction=0.5 if isinstance(offload_fraction, str) else float(offload_fraction),
            device_memory_budget=device_memory_budget,
            order=offload_order,
            bucket_bytes=bucket_bytes,
        )
        cpu_class = cpu_optimizer_cls or gpu_optimizer_cls or torch.optim.AdamW
        self._builder = Builder(
            cpu_class=cpu_class,
            gpu_class=gpu_optimizer_cls or cpu_class,
            fp32=param_update_in_fp32,
            pin_grads=pin_cpu_grads,
            pin_params=pin_cpu_params,
            overlap=overlap_cpu_optimizer_d2h_h2d,
            kernel=choose_kernel(kernel),
            lane=lane,
        )
        self._in_backward: InBackward = in_backward if overlap_cpu_optimizer_d2h_h2d else "nothing"
        self._gated = return_in_forward and overlap_cpu_optimizer_d2h_h2d
        self._search = FractionSearch()
        self._placed: Sides | None = None  # None while the base class adds the first groups
        self._hooks: list[RemovableHandle] = []
        super().__init__(params, defaults(cpu_class, self._builder.gpu_class, kwargs))
        self._place({})

    # ---- what lives where -------------------------------------------------------------------------------------------

    def _place(self, states: Mapping[Tensor, State]) -> None:
        """Decide which side updates what, and move masters and states there. All parameters must be back."""
        params: list[Tensor] = [param for group in self.param_groups for param in group["params"]]
        group_of = [index for index, group in enumerate(self.param_groups) for _ in group["params"]]
        sides = self._builder.build(params, group_of, self.param_groups, self._targets)
        sides.load_masters(states)
        sides.load_states(states, self.param_groups)
        if self._placed is not None:
            sides.begun = self._placed.begun
            self._placed.host.close()
        self._placed = sides
        self._gate = Gate(self._finish)
        self._order = list(range(len(sides.host.runs)))  # in which buckets are updated
        self._seen: dict[int, int] = defaultdict(int)  # parameter (id) -> its gradients since step()
        self._usual: dict[int, int] = {}  # the same, for the step before
        self._memory = [param.data_ptr() for param in params]
        self._kinds = [(param.device, param.dtype) for param in params]
        self._trained = [param.requires_grad for param in params]
        self._hook()

    @property
    def _sides(self) -> Sides:
        assert self._placed is not None, "the base class calls __init__ first"
        return self._placed

    @property
    def _runs(self) -> list[BucketRun]:
        return [] if self._placed is None else self._placed.host.runs

    def _hook(self) -> None:
        """Hook every parameter's gradient. The hooks hold the optimizer weakly and do not keep it alive."""
        for handle in self._hooks:
            handle.remove()
        me = weakref.ref(self)

        def arrived(param: Tensor) -> None:
            optimizer = me()
            if optimizer is not None:
                optimizer._gradient_arrived(param)

        hosted: list[Any] = [param for param in self._sides.params if self._sides.host.runs_of(param)]
        wanted = self._in_backward != "nothing"
        self._hooks = [param.register_post_accumulate_grad_hook(arrived) for param in hosted if wanted]

    def _place_again(self) -> None:
        self.wait()
        self._place(self._sides.captured())

    def set_offload_fraction(self, fraction: float) -> float:
        """Move updates between the sides; weights and states keep their values. Returns the fraction that was
        reached."""
        self._require_between_steps("set_offload_fraction()")
        self._targets = replace(self._targets, fraction=fraction)
        self._place_again()
        return self.placement().offload_fraction

    def placement(self) -> Placement:
        """What each side updates, and the bytes it takes."""
        self.wait()
        return self._sides.placement(the_device(self._sides.params))

    @property
    def sub_optimizers(self) -> list[Any]:
        """One optimizer for each bucket on the host, then the device's, with ``param_groups`` and ``state`` like
        torch's. The next step takes over options that were changed there."""
        self.wait()
        device = [] if self._sides.device is None else [self._sides.device.optimizer]
        return [*(run.rule for run in self._runs), *device]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; then decides again which side updates what."""
        self._require_between_steps("add_param_group()")
        super().add_param_group(param_group)
        if self._placed is not None:
            self._place_again()

    # ---- backward ---------------------------------------------------------------------------------------------------

    @outside_modes
    def _gradient_arrived(self, param: Tensor) -> None:
        if isinstance(param, AwayParameter):
            param.open()  # its graph is older than the step: the gradient must not overtake the update
        self._seen[id(param)] += 1
        early = self._in_backward == "step"
        if early and self._seen[id(param)] > 1:
            self._refuse_early("a second backward before step(), or one after a step that was left out,")
        if self._seen[id(param)] != (1 if early else self._usual.get(id(param), 1)):
            return
        with torch.no_grad():
            for run in self._sides.host.arrive(param):
                if early:
                    self._update_early(run)

    def _update_early(self, run: BucketRun) -> None:
        self._follow_writes([piece.param for piece in run.bucket.pieces])
        run.link.pull(self.param_groups)
        run.link.push(self.param_groups)
        self._sides.host.start_update(run, self._sides.host.send(run))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; also drops ``decoupled_grad`` and the copies of both."""
        self._require_between_steps("zero_grad()")
        super().zero_grad(set_to_none)
        for param in self._sides.params:
            if getattr(param, "decoupled_grad", None) is not None:
                param.decoupled_grad = None  # type: ignore[attr-defined]
        self._drop_sent()

    def _drop_sent(self) -> None:
        self._sides.host.forget()
        self._seen.clear()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` over both sides; returns the norm before clipping, as a 0-dim tensor.
        Copies that were sent are scaled on the host and not sent again. Raises RuntimeError as torch does."""
        if self._in_backward == "step":
            self._refuse_early("clip_grad_norm_()")
        norm = torch.nn.utils.get_total_norm(self._gradients(), norm_type, error_if_nonfinite, foreach)
        scale = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
        if scale != 1.0:
            self._scale_gradients(scale)
        return norm

    def _gradients(self) -> list[Tensor]:
        found = [gradient_of(param) for param in self._sides.params]
        return [grad for grad in found if grad is not None]

    @torch.no_grad()
    def _scale_gradients(self, scale: float) -> None:
        grads = self._gradients()
        if grads:
            self._sides.host.rescale(scale, lambda: torch._foreach_mul_(grads, scale))

    # ---- step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update both sides. On return, parameters may still be on their way back; their first use waits. Parameters
        without a gradient do not change. ``closure`` is called once; its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._unscaled():
            return loss
        self.wait()
        self._follow_changes()
        self._link()
        away = self._start()
        try:
            self._step_device()
            self._sides.host.wait_sent()  # after step() the caller may overwrite the gradients
        finally:
            self._end_step(away)
        return loss

    def _unscaled(self) -> bool:
        """Unscale as torch.amp.GradScaler asks, by attributes that it sets during its step(). False: skip this step.

        Its ``unscale_`` writes to gradients without counting the write, so earlier copies are invalid."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is None:
            return True
        if self._in_backward == "step":
            self._refuse_early("torch.amp.GradScaler")
        if float(found_inf) != 0.0:
            self._drop_sent()
            return False
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        if grad_scale is None:
            self._sides.host.forget()
        else:
            self._scale_gradients(float(grad_scale.double().reciprocal().float()))
        return True

    def _follow_changes(self) -> None:
        """Find parameters that were unfrozen, moved or written to since the last step."""
        params = self._sides.params
        if self._measured:
            self._adapt()
        if any(param.requires_grad and not was for param, was in zip(params, self._trained, strict=True)):
            self._require_between_steps("unfreezing a parameter")
            self._place_again()
        if [param.data_ptr() for param in params] != self._memory:
            self._require_between_steps("giving a parameter another .data")
            self._follow_moves()
        self._follow_writes(range(len(params)))

    def _adapt(self) -> None:
        wanted = self._search.note(self._targets.fraction, *self._sides.host.take_times())
        if wanted is not None and self._in_backward != "step":
            self._targets = replace(self._targets, fraction=wanted)
            self._place_again()

    def _follow_moves(self) -> None:
        for index, (param, was) in enumerate(zip(self._sides.params, self._kinds, strict=True)):
            if (param.device, param.dtype) != was:
                raise UnsupportedError(
                    f"parameter {index} was {was[1]} on {was[0]} and is now {param.dtype} on {param.device}: "
                    "move or convert the model first, then make the optimizer"
                )
        self._place_again()
        self._sides.forget_writes()

    def _follow_writes(self, indices: Sequence[int]) -> None:
        written = self._sides.written(indices)
        if not written:
            return
        updated = [run for run in self._runs if run.update is not None]
        if any(piece.param in written for run in updated for piece in run.bucket.pieces):
            self._refuse_early("writing to a parameter between backward and step()")
        self._sides.take_over(written)

    def _link(self) -> None:
        """Copy hyper-parameters in both directions."""
        for run in self._runs:
            if run.update is not None and (names := run.link.changed(self.param_groups)):
                self._refuse_early(f"changing {', '.join(names)} between backward and step()")
        for link in self._pull():
            link.push(self.param_groups)

    def _pull(self) -> list[HyperLink]:
        """Take over what was changed in or added to groups on either side; returns the links of all that no early
        update is using."""
        links = [self._sides.device_link, *(run.link for run in self._runs if run.update is None)]
        for link in links:
            link.pull(self.param_groups)
        return links

    def _start(self) -> list[int]:
        """Start the host's updates, in the order in which the last forward used the parameters; returns their
        buckets."""
        host, working = self._sides.host, []
        for index in self._order:
            run = host.runs[index]
            found, stale = host.stale(run)
            if run.update is not None and (stale or list(found) != run.present):
                self._refuse_early("changing gradients between backward and step()")
            if not found:
                continue
            if run.update is None:
                host.start_update(run, host.send(run))
            host.start_return(run)
            self._sides.begun.update(id(run.params[at]) for at in found)
            working.append(index)
        return working

    def _step_device(self) -> None:
        side = self._sides.device
        if side is not None:
            stepped = [side.pieces[at].param for at in side.step()]
            self._sides.begun.update(id(self._sides.params[index]) for index in stepped)
            self._sides.remember(stepped)

    def _end_step(self, away: Sequence[int]) -> None:
        self._usual = dict(self._seen)
        self._drop_sent()
        members = {index: self._runs[index].params for index in away}
        closed = {
            index: [param for param in dict.fromkeys(params) if isinstance(param, nn.Parameter)]
            for index, params in members.items()
            if self._gated and all(type(param) is nn.Parameter for param in params)
        }
        for index in away:
            if index not in closed:
                self._finish(index)
        self._gate.close(closed)

    def _finish(self, index: int) -> None:
        run = self._runs[index]
        self._sides.host.finish(run)
        self._sides.remember(piece.param for piece in run.bucket.pieces)

    def wait(self) -> None:
        """Wait until every parameter is back, and take over what the step wrote into parameter groups. The next step
        updates buckets in this step's order of first use."""
        if self._placed is None:
            return
        self._gate.open_all()
        self._pull()
        used = list(dict.fromkeys(self._gate.order))
        self._order = used + [index for index in self._order if index not in set(used)]

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Also wait in forward pre-hooks, module by module: kernels that bypass torch's functions need it, and so do
        compiled modules, which wait as a whole. Returns the hooks' handles."""
        return attach(module, [param for param in self._sides.params if isinstance(param, nn.Parameter)])

    def refresh_masters(self) -> None:
        """Copy every parameter into its master. Writes that torch counts need no call; those to ``.data``, or by
        libraries that do not count them, do."""
        self._require_between_steps("refresh_masters()")
        self.wait()
        self._sides.load_masters({})

    def close(self) -> None:
        """Wait, then end threads and remove hooks. No further step is possible; weights and states can still be read.
        Idempotent."""
        self.wait()
        for handle in self._hooks:
            handle.remove()
        self._sides.host.close()
        self._builder.close()

    # ---- state ------------------------------------------------------------------------------------------------------

    @property  # type: ignore[override]  # torch has a dict that anybody writes to
    def state(self) -> Mapping[Tensor, State]:
        """Parameter -> its state in torch's format; a new dict each time. Holds the live tensors of a parameter that
        one side has whole, and joined CPU copies for one that is cut. 16-bit parameters updated in fp32 also have
        ``master_param``. Use ``load_state_dict`` to change it."""
        self._require_between_steps("reading the state")
        self.wait()
        return {} if self._placed is None else self._placed.states()

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        if value:
            raise UnsupportedError("HybridDeviceOptimizer.state cannot be assigned: call load_state_dict()")

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with what the classes of both sides wrote into their groups."""
        self.wait()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and states that this class or ``gpu_optimizer_cls`` saved; tensors are copied. Masters come from
        the state, or from the parameters if it has none. Hooks run as in torch. Raises ValueError if the groups do not
        match, ConfigError if a state lacks what Adam needs."""
        self._require_between_steps("load_state_dict()")
        self.wait()
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        saved = fitting(state_dict["param_groups"], self.param_groups)
        for group, options in zip(self.param_groups, saved, strict=True):
            group.update({**self.defaults, **deepcopy(options_of(options))})
        keys = [key for options in saved for key in options["params"]]
        states = {param: state_dict["state"].get(key, {}) for key, param in zip(keys, self._sides.params, strict=True)}
        self._sides.load_masters(states)
        self._sides.load_states(states, self.param_groups)
        self._sides.begun = {id(param) for param, state in states.items() if state}
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def dummy_step(self) -> None:
        """Create the state of every parameter, as a template for loading: step counts are zero, weights do not
        change."""
        self._require_between_steps("dummy_step()")
        self.wait()
        self._sides.prepare()

    def _require_between_steps(self, what: str) -> None:
        if any(run.update is not None and run.back is None for run in self._runs):
            self._refuse_early(f"{what} between backward and step()")

    def _refuse_early(self, what: str) -> NoReturn:
        raise UnsupportedError(
            f'{what} is not possible with in_backward="step", which updates as gradients arrive; use in_backward="send"'
        )

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "HybridDeviceOptimizer has threads and cannot be copied or pickled; make a new one and load this one's "
            "state_dict()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__reduce__()
