//! Mask objects by the addresses of the tensors that they were made from. A call whose masks are these tensors uses the
//! object. The maker of an object must give it tensors that no other call uses.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fmha_c::{FmhaMaskObject, FmhaPlan};
use fmha_core::fork::PerProcess;

use crate::call::{Call, Key, Wrong, ensure};
use crate::masks::SLOTS;
use crate::plans::{planned, said};
use crate::request::Request;

/// An object, freed with its last user. Memory that queued work still uses is given back by the driver when that work
/// is done.
pub(crate) struct Object {
    object: FmhaMaskObject,
    /// Plan of the forward call for which the object was made, with that call's numbers.
    plan: Arc<FmhaPlan>,
    key: Key,
}

impl Object {
    /// Pointer to the object for a run, valid while this value lives.
    pub(crate) fn pointer(&self) -> *const FmhaMaskObject {
        &raw const self.object
    }
}

/// Addresses of a call's mask tensors; 0 for an absent mask.
type Places = [usize; SLOTS.len()];

#[derive(Default)]
struct Kept {
    by_number: HashMap<i64, (Places, Arc<Object>)>,
    by_place: HashMap<Places, Arc<Object>>,
}

static OBJECTS: PerProcess<Mutex<Option<Kept>>> = PerProcess::of_first(Mutex::new(None));
/// Number of mask objects. Most programs have none, and then no lookup is made.
static COUNT: AtomicUsize = AtomicUsize::new(0);
static NEXT: AtomicI64 = AtomicI64::new(1);

fn kept() -> MutexGuard<'static, Option<Kept>> {
    OBJECTS.get(|| Mutex::new(None)).lock().unwrap_or_else(PoisonError::into_inner)
}

fn places(request: &Request) -> Places {
    SLOTS.map(|slot| request.get(slot).map_or(0, |tensor| tensor.data as usize))
}

/// The mask object made for this call's mask tensors, if there is one.
pub(crate) fn of(request: &Request) -> Option<Arc<Object>> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    kept().as_ref()?.by_place.get(&places(request)).cloned()
}

/// Makes an object for a forward call, and for a backward one where it is given. Returns its number.
///
/// # Errors
/// A fault of a request, why no kernel takes it, or why no object serves it.
pub(crate) fn make(forward: &Request, backward: Option<&Request>) -> Result<i64, Wrong> {
    let places = places(forward);
    ensure!(places.iter().any(|&place| place != 0), "mask: the call has 0 masks as data");
    let call = Call::new(forward)?;
    let plan = planned(&call)?;
    let of_backward = backward.map(|request| planned(&Call::new(request)?)).transpose()?;
    let object = said(FmhaPlan::mask_object(Some(&plan), of_backward.as_deref(), &call.args()))?;
    let object = Arc::new(Object { object, plan, key: call.key() });
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut kept = kept();
    let all = kept.get_or_insert_default();
    all.by_place.insert(places, Arc::clone(&object));
    all.by_number.insert(number, (places, object));
    COUNT.store(all.by_number.len(), Ordering::Release);
    Ok(number)
}

/// Queues the building of an object on the stream of its forward call's request.
///
/// # Errors
/// An unknown number; a call for which the object was not made; an error of the driver.
pub(crate) fn build(number: i64, forward: &Request) -> Result<(), Wrong> {
    let object = kept().as_ref().and_then(|kept| kept.by_number.get(&number)).map(|it| Arc::clone(&it.1));
    let object = object.ok_or_else(|| format!("mask: {number} is no mask object of this process"))?;
    let call = Call::new(forward)?;
    ensure!(
        call.key() == object.key,
        "mask: object {number} was made for another call than it is built with"
    );
    // SAFETY: who made the request promised its pointers.
    said(unsafe { object.plan.build_mask(&object.object, &call.args()) })
}

/// Forgets a mask object. Calls that are just being queued keep it until they are queued.
pub(crate) fn forget(number: i64) {
    let mut kept = kept();
    let Some(all) = kept.as_mut() else { return };
    let Some((places, object)) = all.by_number.remove(&number) else { return };
    // A later object's tensors may have the addresses of this object's tensors.
    if all.by_place.get(&places).is_some_and(|other| Arc::ptr_eq(other, &object)) {
        all.by_place.remove(&places);
    }
    COUNT.store(all.by_number.len(), Ordering::Release);
    drop(kept);
}
