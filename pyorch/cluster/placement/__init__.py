"""Places a model's experts on the servers of a cluster (DanceMoE, section III).

placement.py has the result and its file, dance.py the algorithm.
"""
