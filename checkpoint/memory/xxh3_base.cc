#define REMESH_XXH3 xxh3_base
#include "checkpoint/memory/xxh3_body.h"
