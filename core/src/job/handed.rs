//! Jobs as this replica has handed them out. Who completes one mostly does so where it was claimed, and
//! then neither the job nor its lease has to be read: while the lease stands nobody rewrites the job,
//! and the guards tell if it does not.

use alloc::collections::BTreeMap;

use super::lease::Granted;
use super::record::Job;
use crate::ids::{JobId, Token};
use crate::limits;
use crate::store::Version;

/// A job's record with its version, and its lease.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct HandedOut {
    pub version: Version,
    pub job: Job,
    pub granted: Granted,
}

/// The newest that were handed out; older ones are forgotten by halves.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Handed {
    young: BTreeMap<JobId, HandedOut>,
    old: BTreeMap<JobId, HandedOut>,
}

impl Handed {
    pub fn put(&mut self, id: JobId, handed: HandedOut) {
        if handed.job.metadata.as_ref().is_some_and(|m| m.len() > limits::HANDED_METADATA) {
            return;
        }
        if self.young.len() >= limits::HANDED / 2 {
            self.old = core::mem::take(&mut self.young);
        }
        self.young.insert(id, handed);
    }

    /// The job, if it was handed out here under that token. Once only: if it turns out to be of the
    /// past, it is read.
    pub fn take(&mut self, id: JobId, token: Token) -> Option<HandedOut> {
        let of = |handed: &HandedOut| handed.granted.token() == token;
        let generation = [&mut self.young, &mut self.old].into_iter().find(|g| g.get(&id).is_some_and(of))?;
        generation.remove(&id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Maker;
    use crate::job::record::{Class, Lease, Policy, Terms, Trail};
    use alloc::string::String;

    fn handed(nonce: u64, metadata: usize) -> HandedOut {
        let (tenant, queue) = (String::from("t"), String::from("q"));
        let job = Job {
            tenant: tenant.clone(),
            queue: queue.clone(),
            class: Class::System,
            policy: Policy::standard(0),
            key: None,
            born: 0,
            submitted: 0,
            due: 0,
            attempts: 0,
            deliveries: 0,
            lives: 0,
            end: None,
            deleted: false,
            payload_len: 0,
            metadata: Some(alloc::vec![0; metadata]),
            traceparent: None,
            trail: Trail::default(),
        };
        let worker = String::from("w");
        let lease = Lease { worker, tenant, queue, class: Class::System, length_ms: 1, terms: Terms::Standard };
        HandedOut { version: Version(1), job, granted: Granted { lease, version: Version(nonce), at: 1 } }
    }

    #[test]
    fn what_was_handed_out_is_found_once_and_by_its_token_only() {
        let mut make = Maker::new([1; 32]);
        let (id, token) = (make.job_id(1), Token { at: 1, nonce: Version(7) });
        let mut known = Handed::default();
        known.put(id, handed(7, 0));
        assert!(known.take(id, Token { at: 1, nonce: Version(8) }).is_none());
        assert!(known.take(id, token).is_some() && known.take(id, token).is_none());
    }

    #[test]
    fn it_is_bounded() {
        let mut make = Maker::new([1; 32]);
        let mut known = Handed::default();
        let ids: alloc::vec::Vec<JobId> = (0..3 * limits::HANDED).map(|_| make.job_id(1)).collect();
        ids.iter().for_each(|id| known.put(*id, handed(7, 0)));
        assert!(known.young.len() + known.old.len() <= limits::HANDED);
        let last = ids.last().copied().unwrap_or_else(|| make.job_id(1));
        assert!(known.take(last, Token { at: 1, nonce: Version(7) }).is_some());
        known.put(last, handed(7, limits::HANDED_METADATA + 1));
        assert!(known.take(last, Token { at: 1, nonce: Version(7) }).is_none());
    }
}
