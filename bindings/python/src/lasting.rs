//! Cache of the lists of tiles that masks as code make: calls of one plan on one stream share them. The first call
//! makes the lists, and later calls read them.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use fmha_c::{FmhaMaskObject, FmhaPlan};
use fmha_core::fork::PerProcess;
use lru::LruCache;

use crate::call::{Call, Key};

/// Most objects that the cache keeps, and most bytes of them together. The least recently used are dropped.
const MOST: NonZeroUsize = NonZeroUsize::MIN.saturating_add(63);
const MOST_BYTES: u64 = 512 << 20;

/// Handle in CUDA and HIP that stands for each thread's own stream.
const STREAM_PER_THREAD: usize = 2;

// Cache of mask objects. `None` stands for lists without an object, which each call makes again.
type Kept = LruCache<Key, Option<Arc<FmhaMaskObject>>>;

static LISTS: PerProcess<Mutex<Option<Kept>>> = PerProcess::of_first(Mutex::new(None));

/// Lists of a call, made now for the first call; `None` where the lists are in the workspace. The caller must not
/// capture the call in a graph, since a graph may outlive the lists.
pub(crate) fn of(call: &Call, plan: &FmhaPlan, args: &fmha_c::FmhaArgs) -> Option<Arc<FmhaMaskObject>> {
    // This one handle means another stream in each thread, and those streams have no order between them.
    if !plan.has_lasting_lists() || args.stream.addr() == STREAM_PER_THREAD {
        return None;
    }
    let key = call.key_of_lists();
    let lists = || LISTS.get(|| Mutex::new(None)).lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = lists().as_mut().and_then(|kept| kept.get(&key).cloned()) {
        return found;
    }
    let made = made(plan, args).map(Arc::new);
    let bytes =
        |kept: &Kept| kept.iter().flat_map(|(_, object)| object).map(|object| object.bytes()).sum::<u64>();
    let mut gone = Vec::new();
    let mut guard = lists();
    let kept = guard.get_or_insert_with(|| LruCache::new(MOST));
    gone.extend(kept.push(key, made.clone()));
    while kept.len() > 1 && bytes(kept) > MOST_BYTES {
        gone.extend(kept.pop_lru());
    }
    // Memory is freed after the lock is released.
    drop(guard);
    drop(gone);
    made
}

/// Makes an object with a call's lists; `None` where the object is refused or too large. Such a call makes its lists in
/// the workspace.
fn made(plan: &FmhaPlan, args: &fmha_c::FmhaArgs) -> Option<FmhaMaskObject> {
    let of_plan = |forward, backward| FmhaPlan::mask_object(forward, backward, args);
    let made = of_plan(Some(plan), None).or_else(|_| of_plan(None, Some(plan))).ok()?;
    if made.bytes() > MOST_BYTES / 2 {
        return None;
    }
    // SAFETY: who made the request promised its pointers.
    unsafe { plan.build_mask(&made, args) }.ok()?;
    Some(made)
}
