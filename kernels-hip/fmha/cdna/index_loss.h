// The loss that trains an indexer, on MFMA (amd/index_loss.h).
#pragma once
#include <fmha/amd/index_loss.h>
#include <fmha/cdna/bwd/lists.h>
