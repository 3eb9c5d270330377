from adjoint.batch import State as State
from adjoint.layers.block import WINDOWED as WINDOWED
from adjoint.layers.block import Block as Block
from adjoint.layers.config import MIXERS as MIXERS
from adjoint.layers.config import StackConfig as StackConfig
from adjoint.layers.mixer import Mixer as Mixer
from adjoint.layers.mixer import ScanMixer as ScanMixer

__all__ = ["MIXERS", "WINDOWED", "Block", "Mixer", "ScanMixer", "StackConfig", "State"]
