//! Whatever bytes a store or a client gives: decoding never panics, and what was decoded reads back.

#![no_main]

use leasehold_core::event::Event;
use leasehold_core::group::record::Group;
use leasehold_core::job::record::{Job, KeyRecord, Lease, ProgressRecord, QueueRecord};
use leasehold_core::pool::record::{Pool, Slot};
use leasehold_core::request::SlotId;
use leasehold_core::store::keys;
use leasehold_core::{GroupId, JobId, Name, Token, codec};
use libfuzzer_sys::fuzz_target;

macro_rules! reads_back {
    ($bytes:expr, $($record:ty),* $(,)?) => {
        $(if let Ok(record) = codec::decode::<$record>($bytes) {
            let again = codec::encode(&record);
            let read = codec::decode::<$record>(&again).expect("what was encoded can be decoded");
            assert_eq!(format!("{record:?}"), format!("{read:?}"));
        })*
    };
}

fuzz_target!(|bytes: &[u8]| {
    reads_back!(bytes, Job, Lease, ProgressRecord, KeyRecord, QueueRecord, Group, Pool, Slot, Event);
    let _ = keys::queue_of(&Name::new(bytes));
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let slot = SlotId::parse(text);
    assert_eq!(SlotId::parse(&slot.to_string()), slot);
    if let Ok(id) = text.parse::<GroupId>() {
        assert_eq!(id.to_string().parse::<GroupId>().ok(), Some(id));
    }
    if let Ok(id) = text.parse::<JobId>() {
        assert_eq!(id.to_string().parse::<JobId>().ok(), Some(id));
        let _ = Token::parse(text, id);
    }
});
