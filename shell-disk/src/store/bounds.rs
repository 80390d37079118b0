//! What the tables can hold. The core's names are far below it; a commit beyond is not applied.

use leasehold_core::Name;
use leasehold_core::store::{Commit, Each, Take, Txn, Write};

/// Bytes of a record's key, of an index's or a log's name, and of a member. Two of them and a score
/// make one key of a table, which may have 65,535.
const NAME_MAX: usize = 16 * 1024;

fn name(name: &Name) -> bool {
    name.len() <= NAME_MAX
}

/// A table has no place for an empty key.
fn key(key: &Name) -> bool {
    !key.is_empty() && name(key)
}

/// Whether everything that a commit may write can be kept.
pub(super) fn hold(commit: &Commit) -> bool {
    commit.txns.iter().all(|txn| txn_holds(txn))
}

fn txn_holds(txn: &Txn) -> bool {
    let write = |write: &Write| match write {
        Write::Put { key: k, .. } | Write::Delete(k) | Write::Expire(k, _) => key(k),
        // A take may put a record under a member's own name.
        Write::Add { index, member, .. } | Write::Remove { index, member } => name(index) && key(member),
        Write::Append { log, .. } => name(log),
        Write::Notify(_) => true,
    };
    txn.writes.iter().all(write) && txn.take.as_ref().is_none_or(take_holds)
}

fn take_holds(take: &Take) -> bool {
    take.from.iter().flat_map(|source| &source.each).all(|each| match each {
        Each::Add { index: n, .. }
        | Each::Remove { index: n }
        | Each::Put { prefix: n, .. }
        | Each::Delete { prefix: n } => name(n),
    })
}
