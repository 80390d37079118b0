//! Bodies and queries of every call: read, or refused with a status of 400 to 499; never a panic.

#![no_main]

use bytes::Bytes;
use leasehold_http::problem::Problem;
use leasehold_http::wire::{decode, group, pool, query, submit, time};
use libfuzzer_sys::fuzz_target;

fn carried() -> submit::Carried {
    submit::Carried { key: None, traceparent: None }
}

fn refused<T>(result: Result<T, Problem>) {
    if let Err(problem) = result {
        assert!(problem.status().is_client_error(), "{problem:?}");
        let mut out = Vec::new();
        problem.write(&mut out);
        assert!(std::str::from_utf8(&out).is_ok());
    }
}

const JOB: &str = "01ARZ3NDEKTSV4RRFFQ69G5FAV";

fuzz_target!(|bytes: &[u8]| {
    let Some((kind, rest)) = bytes.split_first() else { return };
    let body = Bytes::copy_from_slice(rest);
    let text = std::str::from_utf8(rest).ok();
    match kind % 20 {
        0 => refused(submit::json(&body, carried())),
        1 => refused(decode::claim(&body)),
        2 => refused(decode::Under::Heartbeat.read(JOB, &body)),
        3 => refused(decode::Under::Complete.read(JOB, &body)),
        4 => refused(decode::Under::Fail.read(JOB, &body)),
        5 => refused(decode::Under::Release.read(JOB, &body)),
        6 => refused(decode::batch(&body, "items").and_then(|items| {
            items.into_iter().try_for_each(|raw| decode::Under::Complete.item(raw, &body).map(drop))
        })),
        7 => refused(decode::batch(&body, "jobs").and_then(|items| {
            items.into_iter().try_for_each(|raw| submit::item(raw, &body, None).map(drop))
        })),
        8 => refused(decode::set_queue("q".into(), &body)),
        9 => refused(decode::pause("q".into(), &body)),
        10 => refused(decode::purge("q".into(), &body)),
        11 => refused(decode::nothing(&body)),
        12 => refused(group::create(&body, carried())),
        13 => refused(group::extend(&body)),
        14 => refused(pool::set("p".into(), &body)),
        15 => refused(pool::acquire("p".into(), &body)),
        _ => {
            let Some(text) = text else { return };
            match kind % 20 {
                16 => {
                    refused(decode::list(text));
                    refused(decode::events(text));
                }
                17 => {
                    refused(decode::children(text));
                    refused(decode::audit(text));
                    refused(decode::group(text));
                }
                18 => {
                    refused(query::parameters(text));
                    assert_eq!(query::decode(&query::encode(text), true).as_deref(), Some(text));
                }
                _ => {
                    let _ = time::parse(text);
                    refused(decode::job_id(text));
                    refused(group::id(text));
                }
            }
        }
    }
});
