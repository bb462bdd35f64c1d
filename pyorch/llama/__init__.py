"""llama.cpp through llama_cpp, with experts under an engine."""
