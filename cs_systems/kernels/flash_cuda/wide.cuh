// wgmma with sums of 144 to 192 columns, both operands in shared memory, and warp-wide products: what forward.cu needs
// beyond hopper.cuh.
#pragma once

#include "hopper.cuh"

#define WGMMA_SUM_72 WGMMA_SUM_64, WGMMA_8(64)
#define WGMMA_SUM_80 WGMMA_SUM_72, WGMMA_8(72)
#define WGMMA_SUM_88 WGMMA_SUM_80, WGMMA_8(80)
#define WGMMA_SUM_96 WGMMA_SUM_88, WGMMA_8(88)
#define WGMMA_LIST_72 WGMMA_LIST_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define WGMMA_LIST_80 WGMMA_LIST_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_LIST_88 WGMMA_LIST_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define WGMMA_LIST_96 WGMMA_LIST_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_LIST_48                                                                                           \
  WGMMA_LIST_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_SUM_48 WGMMA_SUM_32, WGMMA_8(32), WGMMA_8(40)
#define WGMMA_SS(N, HALF, A, B, ADD, TA, TB)                                                       \
  template <int TRANS_A, int TRANS_B>                                                              \
  DEVICE void mma(float (&d)[HALF], u64 a, u64 b, int add) {                                       \
    asm volatile(WGMMA(#N, #ADD) WGMMA_LIST_##HALF "}, %" #A ", %" #B ", p, 1, 1, %" #TA ", %" #TB "; }" \
                 : WGMMA_SUM_##HALF                                                                \
                 : "l"(a), "l"(b), "r"(add), "n"(TRANS_A), "n"(TRANS_B));                          \
  }
WGMMA_SS(96, 48, 48, 49, 50, 51, 52)
WGMMA_SS(144, 72, 72, 73, 74, 75, 76)
WGMMA_SS(160, 80, 80, 81, 82, 83, 84)
WGMMA_SS(176, 88, 88, 89, 90, 91, 92)
WGMMA_SS(192, 96, 96, 97, 98, 99, 100)

// 16 x 8 sums of one warp, over 16 of k: what wgmma would add to d[0] ... d[3].
DEVICE void mma_warp(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
