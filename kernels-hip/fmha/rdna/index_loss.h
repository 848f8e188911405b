// The loss that trains an indexer, on WMMA (amd/index_loss.h).
#pragma once
#include <fmha/amd/index_loss.h>
#include <fmha/rdna/bwd/lists.h>
