// See device_stress.cpp. FILE.gguf at path is written, used and left.

#pragma once

void stress_device(const char * path, int seed, int n_passes);
