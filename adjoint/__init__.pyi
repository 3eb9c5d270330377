from adjoint.engine.host_weights import offload_weights as offload_weights
from adjoint.hf.wrap import unwrap as unwrap
from adjoint.hf.wrap import wrap as wrap
from adjoint.kernels.dispatch import backends as backends
from adjoint.kernels.dispatch import unusable_backends as unusable_backends
from adjoint.kernels.linear_scan import linear_scan as linear_scan
from adjoint.kernels.selective_scan import selective_scan as selective_scan
from adjoint.kernels.ssd_scan import ssd_scan as ssd_scan
from adjoint.layers import StackConfig as StackConfig
from adjoint.methods import Backprop as Backprop
from adjoint.methods import Exact as Exact
from adjoint.methods import LayerLocal as LayerLocal
from adjoint.methods import MiniSequence as MiniSequence
from adjoint.methods import Truncated as Truncated
from adjoint.stack import Stack as Stack
from adjoint.stack import StackOutput as StackOutput
from adjoint.stack.recurrence import checkpoint_sequence as checkpoint_sequence
from adjoint.train.distillation_loss import distillation_loss as distillation_loss
from adjoint.train.in_backward import optimizer_in_backward as optimizer_in_backward
from adjoint.train.multi_token_loss import multi_token_loss as multi_token_loss
from adjoint.train.token_logprobs import token_logprobs as token_logprobs

__version__: str
