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

type Kept = LruCache<Key, Arc<FmhaMaskObject>>;

static LISTS: PerProcess<Mutex<Option<Kept>>> = PerProcess::of_first(Mutex::new(None));

/// The lists of a call, made now where it is the first; `None` where they are the workspace's. Whoever asks does not
/// capture the call: a graph would outlive them.
pub(crate) fn of(call: &Call, plan: &FmhaPlan, args: &fmha_c::FmhaArgs) -> Option<Arc<FmhaMaskObject>> {
    if !plan.has_lasting_lists() {
        return None;
    }
    let key = call.key_of_lists();
    let lists = || LISTS.get(|| Mutex::new(None)).lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = lists().as_mut().and_then(|kept| kept.get(&key).cloned()) {
        return Some(found);
    }
    let of_plan = |forward, backward| FmhaPlan::mask_object(forward, backward, args);
    // A call that is refused here makes its lists in the workspace, as without an object.
    let made = of_plan(Some(plan), None).or_else(|_| of_plan(None, Some(plan))).ok()?;
    if made.bytes() > MOST_BYTES / 2 {
        return None;
    }
    // SAFETY: who made the request promised its pointers.
    unsafe { plan.build_mask(&made, args) }.ok()?;
    let made = Arc::new(made);
    let mut gone = Vec::new();
    let mut guard = lists();
    let kept = guard.get_or_insert_with(|| LruCache::new(MOST));
    gone.extend(kept.push(key, Arc::clone(&made)));
    while kept.len() > 1 && kept.iter().map(|(_, object)| object.bytes()).sum::<u64>() > MOST_BYTES {
        gone.extend(kept.pop_lru());
    }
    // Memory is given back without the lock.
    drop(guard);
    drop(gone);
    Some(made)
}
