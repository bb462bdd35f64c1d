"""The types of numbers that servers send in rows, in the order of pyorch_rows, and their bytes."""

ROW_BYTES = {"f32": 4, "bf16": 2}
ROW_TYPES = tuple(ROW_BYTES)
