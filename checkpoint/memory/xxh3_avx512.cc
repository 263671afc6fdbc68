#define REMESH_XXH3 xxh3_avx512
#include "checkpoint/memory/xxh3_body.h"
