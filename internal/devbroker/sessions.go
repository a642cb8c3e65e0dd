package devbroker

import (
	"bytes"
	"cmp"
	"log/slog"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	mochi "github.com/mochi-mqtt/server/v2"
	"github.com/mochi-mqtt/server/v2/packets"
)

// sessions repairs how mochi keeps and hands over sessions. Five things go wrong in v2.7.9:
//
//  1. What waits for an offline session is sent in random order within a second: it is sorted by uint16(Created), and
//     Created is in seconds. Here Created is a counter, and renumbered from 0 when the session comes back, so that 16
//     bits tell all of it apart.
//  2. A message published between the copying of a session's queue and its new connection is lost. Here publishing waits
//     for the hand-over.
//  3. In the same window a message may be sent before the CONNACK, which clients refuse.
//  4. When a connection takes a session over, the old one's will may come after the new one's first messages ("offline"
//     after "online"), and the end of a clean old one removes the new one from the list. Here the old one ends first.
//  5. The packet ids of a client and those that the broker gives to what it sends are looked up in one map. A SUBSCRIBE
//     is refused (0x91) when a waiting message has its id. Here it is hidden from the look-up. An UNSUBSCRIBE is answered
//     then and not done. Here it is done. (A client that publishes with a session that also receives still loses messages:
//     a PUBLISH ends the delivery with the same id.)
type sessions struct {
	mochi.HookBase
	server  *mochi.Server
	log     *slog.Logger
	counter atomic.Int64
	handing sync.RWMutex // read: a publish is under way; write: a session is handed over
	warning sync.Mutex
	warned  time.Time
	dropped int64 // at the last warning
}

func (h *sessions) ID() string { return "sessions" }

func (h *sessions) Provides(b byte) bool {
	return bytes.IndexByte([]byte{
		mochi.OnConnectAuthenticate, mochi.OnACLCheck, mochi.OnSessionEstablish, mochi.OnPacketSent, mochi.OnPublish,
		mochi.OnPacketProcessed, mochi.OnSubscribe, mochi.OnUnsubscribe, mochi.OnPacketEncode,
	}, b) >= 0
}

func (h *sessions) OnConnectAuthenticate(*mochi.Client, packets.Packet) bool { return true }
func (h *sessions) OnACLCheck(*mochi.Client, string, bool) bool              { return true }

// OnSessionEstablish runs before mochi looks for a session with this client id.
func (h *sessions) OnSessionEstablish(cl *mochi.Client, pk packets.Packet) {
	var old *mochi.Client
	for {
		old, _ = h.server.Clients.Get(cl.ID)
		if old != nil {
			c := old.Net.Conn.(*conn)
			c.cut() // not old.Stop: that may pass for a DISCONNECT, which withholds the will
			<-c.ended
		}
		h.handing.Lock()
		if now, _ := h.server.Clients.Get(cl.ID); now == old || now == nil {
			old = now
			break
		}
		h.handing.Unlock() // another connection with this id was faster
	}
	cl.Net.Conn.(*conn).hold(h.handing.Unlock)
	if old != nil && !old.Properties.Clean && !pk.Connect.Clean {
		handOver(old.State.Inflight, cl.State.Inflight)
	}
}

// handOver moves what waits, and numbers it. mochi would copy it, and sort it to delete it: seconds before the CONNACK.
func handOver(from, to *mochi.Inflight) {
	if from.Len() == 0 {
		return
	}
	type waiting struct {
		created int64
		id      uint16
	}
	var all []waiting // not the packets themselves, as GetAll does: they are large
	for id := range uint16(math.MaxUint16) {
		if pk, ok := from.Get(id + 1); ok {
			all = append(all, waiting{pk.Created, id + 1})
		}
	}
	slices.SortFunc(all, func(a, b waiting) int { return cmp.Compare(a.created, b.created) })
	for i, w := range all {
		if pk, ok := from.Get(w.id); ok {
			pk.Created = int64(i)
			to.Set(pk)
			from.Delete(w.id)
		}
	}
}

// OnPacketSent ends the hand-over: with the CONNACK sent, the new connection is in the list.
func (h *sessions) OnPacketSent(cl *mochi.Client, pk packets.Packet, _ []byte) {
	if pk.FixedHeader.Type == packets.Connack {
		cl.Net.Conn.(*conn).release()
	}
}

// OnPublish and OnPacketProcessed run around the handing out of a message, on the sender's goroutine.
func (h *sessions) OnPublish(cl *mochi.Client, pk packets.Packet) (packets.Packet, error) {
	h.handing.RLock()
	cl.Net.Conn.(*conn).hold(h.handing.RUnlock)
	pk.Created = 1<<16 + h.counter.Add(1)
	return pk, nil
}

func (h *sessions) OnPacketProcessed(cl *mochi.Client, pk packets.Packet, _ error) {
	if pk.FixedHeader.Type == packets.Publish {
		cl.Net.Conn.(*conn).release()
		if h.total() > 0 {
			h.warn()
		}
	}
}

// OnSubscribe and OnPacketEncode run before and after the look-up of the packet id.
func (h *sessions) OnSubscribe(cl *mochi.Client, pk packets.Packet) packets.Packet {
	cl.Net.Conn.(*conn).subscribe, pk.PacketID = pk.PacketID, 0
	return pk
}

// OnUnsubscribe runs after the look-up of the packet id, and before mochi acts on what it found.
func (h *sessions) OnUnsubscribe(cl *mochi.Client, pk packets.Packet) packets.Packet {
	if _, taken := cl.State.Inflight.Get(pk.PacketID); !taken {
		return pk
	}
	for _, sub := range pk.Filters {
		if h.server.Topics.Unsubscribe(sub.Filter, cl.ID) {
			atomic.AddInt64(&h.server.Info.Subscriptions, -1)
		}
	}
	return pk
}

func (h *sessions) OnPacketEncode(cl *mochi.Client, pk packets.Packet) packets.Packet {
	if pk.FixedHeader.Type == packets.Suback {
		pk.PacketID = cl.Net.Conn.(*conn).subscribe
	}
	return pk
}

func (h *sessions) total() int64 {
	return atomic.LoadInt64(&h.server.Info.InflightDropped) + atomic.LoadInt64(&h.server.Info.MessagesDropped)
}

// warn says once a minute how much was dropped.
func (h *sessions) warn() {
	h.warning.Lock()
	defer h.warning.Unlock()
	if dropped := h.total(); dropped != h.dropped && time.Since(h.warned) >= time.Minute {
		h.log.Warn("broker dropped acknowledged messages, a receiver has too many waiting", "messages", dropped-h.dropped)
		h.dropped, h.warned = dropped, time.Now()
	}
}
