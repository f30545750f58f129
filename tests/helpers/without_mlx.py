"""A script's first lines that make a machine without MLX of this one."""

WITHOUT_MLX = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mlx":
            raise ImportError("no MLX here")

sys.meta_path.insert(0, Blocked())
"""
