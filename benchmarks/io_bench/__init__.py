"""What benchmarks/tensor_io.py is made of.

measure       the clock, the page cache, random tensors, and samples with their statistics
rows          ways to write tensors and to read them back: penstock, torch, numpy, safetensors, files
peers         the same for libraries that have to be installed first
limit         what the disk gives at most, by a loop of our own and by fio
transfers     part one: tensors of each size
checkpoints   part two: the state of a model
adaptive      part three: the choice of the way, against each way alone
targets       what is to be reached, and whether it is
show          the tables
"""
