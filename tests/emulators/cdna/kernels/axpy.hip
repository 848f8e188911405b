// y += a * x, one element a work-item. `shift` moves the read of x, so that a test can make it leave its allocation.
#define GLOBAL extern "C" __attribute__((global))

GLOBAL void axpy(float a, const float *x, float *y, int n, int shift) {
  int i = __builtin_amdgcn_workgroup_id_x() * 64 + __builtin_amdgcn_workitem_id_x();
  if (i < n) y[i] += a * x[i + shift];
}
