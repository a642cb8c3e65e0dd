// Package fold counts every event exactly once: it takes the redelivered, reordered, rewound stream of events from a
// broker, stores each under (BranchKey, LSN), and derives from what is stored which events are a run's true history.
//
// Its guarantees:
//
//   - One transaction a batch, and a message is acknowledged to the broker only after the commit that holds it.
//   - Redelivery changes nothing but a counter. The same key with other content is a conflict: both are kept, the one with
//     the smaller content hash is shown, and an Error line, a counter and Verify tell.
//   - Order of arrival does not matter: after any mix of duplication, reordering, loss of acknowledgements, crash and
//     rewind, Show and Verify say what they say after single delivery in order.
//   - Nothing that is missing goes unnoticed: an event names the one before it (prevlsn), and whatever follows a gap is
//     parked, not shown.
//   - What is no event never stops the ones that are: it is set aside, counted and acknowledged.
//
// The rule itself is in schema.sql, as views over what is stored.
package fold
