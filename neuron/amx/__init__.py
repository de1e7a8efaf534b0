"""Kernels for CPUs with AMX (Intel's from Sapphire Rapids on): C++ behind plain C functions, called through ctypes.

`tiles.h` says how float32 products are made of bfloat16 tiles, `linear.cpp` and `attention.cpp` what is made of them,
`library` loads it all. They are built when the project is installed, where there is a C++ compiler.
"""
