"""The configuration of a run: TOML read into frozen dataclasses. An unknown option is an error.

    [train]
    tokens = "8K"

`--set train.tokens=8K` on the command line does the same and wins over the file.
"""

from ithaca.config.build import build as build
from ithaca.config.build import option_defaults as option_defaults
from ithaca.config.read import RENAMED as RENAMED
from ithaca.config.read import parse_config as parse_config
from ithaca.config.read import read_config as read_config
from ithaca.config.sections import AUTO as AUTO
from ithaca.config.sections import Config as Config
from ithaca.config.sections import DataSection as DataSection
from ithaca.config.sections import EvaluateSection as EvaluateSection
from ithaca.config.sections import MeshSection as MeshSection
from ithaca.config.sections import ModelSection as ModelSection
from ithaca.config.sections import RunSection as RunSection
from ithaca.config.sections import TrainSection as TrainSection
from ithaca.config.stages import Stage as Stage
