"""One model on several machines: each rank computes some layers, and hands the result on."""
