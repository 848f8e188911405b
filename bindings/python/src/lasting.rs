//! Lists of tiles of masks as code that are the same in all calls of a plan: made by the first call on a stream, and
//! walked by the later ones there.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use fmha_c::{FmhaMaskObject, FmhaPlan};
use fmha_core::fork::PerProcess;
use lru::LruCache;

use crate::call::{Call, Key};

/// Objects that are kept, and the bytes that they take together; those unused for longest go.
const MOST: NonZeroUsize = NonZeroUsize::MIN.saturating_add(63);
const MOST_BYTES: u64 = 512 << 20;

/// Handle of CUDA's and HIP's stream of each thread.
const STREAM_PER_THREAD: usize = 2;

// `None`: lists that no object was made of, and that each call makes.
type Kept = LruCache<Key, Option<Arc<FmhaMaskObject>>>;

static LISTS: PerProcess<Mutex<Option<Kept>>> = PerProcess::of_first(Mutex::new(None));

/// The lists of a call, made now where it is the first; `None` where they are the workspace's. Whoever asks does not
/// capture the call: a graph would outlive them.
pub(crate) fn of(call: &Call, plan: &FmhaPlan, args: &fmha_c::FmhaArgs) -> Option<Arc<FmhaMaskObject>> {
    // One handle of a stream for as many streams as there are threads has no order between them.
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
    // Memory is given back without the lock.
    drop(guard);
    drop(gone);
    made
}

/// An object with a call's lists; `None` where it is refused or too large. Such a call makes its lists in the
/// workspace, as without an object.
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
