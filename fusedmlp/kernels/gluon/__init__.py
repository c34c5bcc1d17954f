"""Warp-specialised kernels in Gluon, for compute capability 9.x: producer warps load, warpgroups multiply in turns."""
