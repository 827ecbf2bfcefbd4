import os
import sys
from pathlib import Path

from tests.docs.pages import blocks
from tests.docs.small import MyModel as Model

# Lightning calls jsonargparse by names that newer versions deprecate.
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"
[run, *_] = [block.code for block in blocks("docs/guides/lightning-cli.md") if block.language == "yaml"]
Path("run.yaml").write_text(run)
sys.argv = ["train.py", "fit", "--config=run.yaml"]
