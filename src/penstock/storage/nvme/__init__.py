"""Drives of other machines: namespaces of NVMe over Fabrics targets that speak TCP (NVMe/TCP).

Nothing is mounted, and no kernel module or root is needed: the initiator is in C++ (`csrc/nvme/`). Bytes
cross the network as they are, as plain TCP has them: for networks that you trust.
"""
