//! Records written by earlier releases: bytes of one of each kind are kept in `records.hex` for ever, and
//! read back. A record of a newer format is told from a damaged one.
//!
//! A line that is no longer what is written stays, for what is stored; what is written now gets a new
//! line. `UPDATE=1` prints the lines of today.

use leasehold_core::codec::{self, Undecodable};
use leasehold_core::group::record::{Group, Mode, Stop};
use leasehold_core::ids::GroupId;
use leasehold_core::job::record::{
    AttemptEnd, AttemptRecord, Backoff, Class, End, ErrorInfo, History, Job, KeyRecord, Lease, Owner, Policy,
    ProgressRecord, QueueRecord, Status, Trail, decode_content, encode_content,
};
use leasehold_core::opaque::Content;
use leasehold_core::pool::record::{Pool, Slot, SlotState};
use leasehold_core::store::{TakenMember, Version, decode_taken, encode_taken};
use leasehold_core::{JobId, Name, Token};

const JOB: &str = "01HF7YAVEX01CC1K77EHS3FSQB";
const GROUP: &str = "01HF7YAVEX03CC1K77EHS00000";

fn job_id() -> JobId {
    JOB.parse().expect("an id")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn bytes(hex: &str) -> bytes::Bytes {
    let digits: Vec<u8> = hex.bytes().map(|b| char::from(b).to_digit(16).expect("a digit") as u8).collect();
    digits.chunks(2).map(|d| d[0] * 16 + d[1]).collect::<Vec<u8>>().into()
}

fn policy() -> Policy {
    Policy {
        max_attempts: 5,
        max_deliveries: 300,
        max_age_ms: Some(86_400_000),
        lease_ms: None,
        run_timeout_ms: Some(60_000),
        progress_timeout_ms: None,
        queue_ttl_ms: Some(1),
        retention_ms: 3_600_000,
        key_ttl_ms: None,
        backoff: Backoff { base_ms: 1_000, max_ms: 60_000, factor_milli: 2_000, jitter_milli: 100 },
        on_prem: true,
        cost: 2,
    }
}

fn attempt() -> AttemptRecord {
    AttemptRecord {
        delivery: 1,
        token: Token { at: 1_700_000_000_000_000, nonce: Version(0x1234_5678_9abc_def0) },
        worker: "w1".into(),
        ended: 1_700_000_001_000_000,
        outcome: AttemptEnd::Failed,
        error: Some(ErrorInfo { message: "it broke".into(), kind: Some("Broken".into()), detail: None }),
        run_at: Some(1_700_000_002_000_000),
    }
}

fn job() -> Job {
    Job {
        tenant: "default".into(),
        queue: "mail".into(),
        class: Class::Batch,
        policy: policy(),
        key: Some(("k1".into(), Version(7))),
        born: 1_700_000_000_000_000,
        submitted: 1_700_000_000_000_000,
        due: 1_700_000_000_000_001,
        attempts: 1,
        deliveries: 2,
        lives: 0,
        end: Some(End {
            status: Status::Dead,
            at: 1_700_000_003_000_000,
            reason: Some("failed".into()),
            result_len: None,
            attempt: Some(attempt()),
        }),
        deleted: false,
        payload_len: 9_000,
        metadata: Some(b"{}".to_vec()),
        traceparent: None,
        trail: Trail::default().after(Version(1)).after(Version(2)),
    }
}

fn group() -> Group {
    Group {
        tenant: "default".into(),
        queue: "mail".into(),
        class: Class::System,
        mode: Mode::FailFast,
        max_parallel: Some(3),
        policy: policy(),
        traceparent: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into()),
        key: None,
        created: 1_700_000_000_000_000,
        open_until: Some(1_700_000_600_000_000),
        filled: 1_000,
        sealed: false,
        stopped: Some(Stop::ChildDead),
        end: None,
        trail: Trail::default(),
    }
}

/// Checks that the kept bytes are read as the value.
fn read<T: serde::de::DeserializeOwned + PartialEq + std::fmt::Debug>(kept: &bytes::Bytes, value: &T) {
    assert_eq!(codec::decode::<T>(kept).as_ref(), Ok(value));
}

#[test]
fn kept_records_are_read() {
    let history = History { attempts: vec![attempt()], omitted: 4 };
    let lease = Lease {
        worker: "w1".into(),
        tenant: "default".into(),
        queue: "mail".into(),
        class: Class::Interactive,
        length_ms: 30_000,
        terms: leasehold_core::job::record::Terms::Asked,
    };
    let progress = ProgressRecord { lease: Version(9), seq: Some(3), value: b"0.5".to_vec() };
    let key = |owner| KeyRecord { owner, fingerprint: 0x0123_4567_89ab_cdef_0123_4567_89ab_cdef };
    let group_id: GroupId = GROUP.parse().expect("an id");
    let queue = QueueRecord { paused: true, reason: Some("why".into()), lease_ms: Some(100), trail: Trail::default() };
    let pool = Pool { total: 8, batch_max: Some(6), lease_ms: 30_000, deleted: false, trail: Trail::default() };
    let slot = Slot {
        state: SlotState::Waiting { since: 1_700_000_000_000_000 },
        nonce: Version(0x1234_5678_9abc_def0),
        class: Class::Batch,
        cost: 2,
        lease_ms: 5_000,
        holder: Some("w1".into()),
    };
    let granted = Slot { state: SlotState::Granted, holder: None, ..slot.clone() };
    let content = Content::binary("text/plain", b"payload".to_vec());
    let taken = vec![TakenMember { source: 2, member: Name::from(JOB), score: 1_700_000_000_000_000 }];
    let today = [
        ("job", codec::encode(&job())),
        ("history", codec::encode(&history)),
        ("lease", codec::encode(&lease)),
        ("progress", codec::encode(&progress)),
        ("key-of-a-job", codec::encode(&key(Owner::Job(job_id())))),
        ("key-of-a-group", codec::encode(&key(Owner::Group(group_id)))),
        ("queue", codec::encode(&queue)),
        ("group", codec::encode(&group())),
        ("pool", codec::encode(&pool)),
        ("slot", codec::encode(&slot)),
        ("slot-granted", codec::encode(&granted)),
        ("payload", encode_content(&content)),
        ("taken", encode_taken(&taken)),
    ];
    if std::env::var_os("UPDATE").is_some() {
        today.iter().for_each(|(name, bytes)| println!("{name} {}", hex(bytes)));
    }
    let mut met = 0;
    for (name, kept) in include_str!("records.hex").lines().filter_map(|line| line.split_once(' ')) {
        let kept = bytes(kept);
        met += 1;
        match name {
            "job" => read(&kept, &job()),
            "history" => read(&kept, &history),
            "lease" => read(&kept, &lease),
            "progress" => read(&kept, &progress),
            "key-of-a-job" => read(&kept, &key(Owner::Job(job_id()))),
            "key-of-a-group" => read(&kept, &key(Owner::Group(group_id))),
            "queue" => read(&kept, &queue),
            "group" => read(&kept, &group()),
            "pool" => read(&kept, &pool),
            "slot" => read(&kept, &slot),
            "slot-granted" => read(&kept, &granted),
            "payload" => assert_eq!(decode_content(&kept).as_ref(), Ok(&content)),
            "taken" => assert_eq!(decode_taken(&kept), Some(taken.clone())),
            other => assert!(other.is_empty(), "an unknown kind of record: {other}"),
        }
    }
    assert!(met >= today.len(), "one of each kind is kept");
    for (name, bytes) in today {
        let line = format!("{name} {}", hex(&bytes));
        assert!(include_str!("records.hex").lines().any(|l| l == line), "what is written now is not kept: {line}");
    }
}

#[test]
fn a_newer_record_is_told_from_a_damaged_one() {
    let mut newer = codec::encode(&job()).to_vec();
    newer.truncate(newer.len() - 4);
    newer[0] = codec::FORMAT + 1;
    let check = xxhash_rust::xxh3::xxh3_64(&newer) as u32;
    newer.extend_from_slice(&check.to_le_bytes());
    assert_eq!(codec::decode::<Job>(&newer), Err(Undecodable::Newer));
    for at in 0..newer.len() {
        let mut damaged = newer.clone();
        damaged[at] ^= 4;
        assert_eq!(codec::decode::<Job>(&damaged), Err(Undecodable::Corrupt), "byte {at}");
    }
}
