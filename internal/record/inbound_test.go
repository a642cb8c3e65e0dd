package record

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	ce "github.com/cloudevents/sdk-go/v2/event"
)

const (
	nodeInbox  = "postrider/v1/acme/nodes/edge-1/inbox"
	agentInbox = "postrider/v1/acme/agents/counter/inbox"
)

func inlets(t testing.TB, rules ...string) *Inlets {
	t.Helper()
	in := &Inlets{Node: "edge-1", Public: []string{"counter"}}
	for _, s := range rules {
		r, err := ParseRule(s)
		if err != nil {
			t.Fatal(err)
		}
		in.Rules = append(in.Rules, r)
	}
	if err := in.Check(); err != nil {
		t.Fatal(err)
	}
	return in
}

// one decodes what one inlet takes.
func one(t testing.TB, in *Inlets, topic, payload string) Inbound {
	t.Helper()
	list := in.Decode(topic, []byte(payload), false)
	if len(list) != 1 {
		t.Fatalf("%d inputs", len(list))
	}
	return list[0]
}

func event(more string) string {
	return `{"specversion":"1.0","id":"7","source":"/press/3","type":"hot"` + more + `}`
}

func TestInboundFromNodes(t *testing.T) {
	in := inlets(t)
	r := command()
	r.Key.Tenant, r.Correlation, r.Causation, r.Trace = "acme", "c", "d", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	want := Inbound{
		Tenant: "acme", Agent: "billing", Run: "inv-7", ID: "pr:edge-1/default/order-9/c-1", Type: "charge", Source: r.Source(), Data: r.Data,
		Correlation: r.Correlation, Causation: r.Causation, Trace: r.Trace, Hops: 1, Expires: r.Expires, FromNode: r.Node, From: r.Key, LSN: r.LSN,
	}
	if got := one(t, in, nodeInbox, string(r.AppendCloudEvent(nil))); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	// The run that carries what was handed over is a sender as any other.
	r.Key.Run = NodeRun
	if got := one(t, in, nodeInbox, string(r.AppendCloudEvent(nil))); got.Fault != "" || got.From.Run != NodeRun {
		t.Errorf("%+v", got)
	}
	// Only on a node's inbox, where only nodes may send, is a node believed to be one.
	if got := one(t, in, agentInbox, strings.Replace(string(r.AppendCloudEvent(nil)), `"billing"`, `"counter"`, 1)); !strings.Contains(got.Fault, "kept for nodes") {
		t.Errorf("%+v", got)
	}
	for name, spoil := range map[string]func(*Record){
		"another tenant's": func(r *Record) { r.Key.Tenant = "other" },
		"an event":         func(r *Record) { *r = sample(); r.Key.Tenant = "acme" },
		"a long type":      func(r *Record) { r.Type = strings.Repeat("x", 256) },
		"a long id":        func(r *Record) { r.InputID = strings.Repeat("x", 513) },
		"too much data":    func(r *Record) { r.Data = []byte(`"` + strings.Repeat("x", MaxInput) + `"`) },
	} {
		bad := r
		spoil(&bad)
		if got := one(t, in, nodeInbox, string(bad.AppendCloudEvent(nil))); got.Fault == "" || got.LSN != 0 || got.ID != "" {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestInboundCloudEvents(t *testing.T) {
	in := inlets(t, "plant/+/temp=thermostat/{1}", "any/#=logger")
	const id = "/press/3 7"
	for _, c := range []struct {
		name, topic, payload string
		want                 Inbound
	}{
		{"node inbox", nodeInbox, event(`,"toagent":"a","torun":"r","data":{"n":1.10}`),
			Inbound{Tenant: "acme", Agent: "a", Run: "r", ID: id, Data: []byte(`{"n":1.10}`)}},
		{"node inbox without run", nodeInbox, event(`,"toagent":"a"`), Inbound{Tenant: "acme", Agent: "a", Run: runOf("a", id), ID: id, Data: []byte("null")}},
		{"public", agentInbox, event(`,"torun":"r"`), Inbound{Tenant: "acme", Agent: "counter", Run: "r", ID: id, Data: []byte("null")}},
		{"public without run", agentInbox, event(``), Inbound{Tenant: "acme", Agent: "counter", Run: runOf("counter", id), ID: id, Data: []byte("null")}},
		{"input id", agentInbox, event(`,"inputid":"order 9","toagent":"counter"`),
			Inbound{Tenant: "acme", Agent: "counter", Run: runOf("counter", "order 9"), ID: "order 9", Data: []byte("null")}},
		{"rule", "plant/press-3/temp", event(`,"torun":"ignored","toagent":"ignored","data":[]`),
			Inbound{Tenant: "default", Agent: "thermostat", Run: "press-3", ID: id, Data: []byte("[]")}},
		{"rule without run", "any", event(`,"torun":"ignored"`), Inbound{Tenant: "default", Agent: "logger", Run: runOf("logger", id), ID: id, Data: []byte("null")}},
		{"what goes along", agentInbox, event(`,"torun":"r","correlationid":"a","causationid":"b","traceparent":"c","expirytime":"2026-01-01T01:00:00+01:00"`),
			Inbound{Tenant: "acme", Agent: "counter", Run: "r", ID: id, Data: []byte("null"), Correlation: "a", Causation: "b", Trace: "c", Expires: 1767225600_000000}},
		{"others' attributes", agentInbox, event(`,"torun":"r","step":3,"hops":{},"sequence":null,"subject":"","x":"1","x":2,"inputid":null`),
			Inbound{Tenant: "acme", Agent: "counter", Run: "r", ID: id, Data: []byte("null")}},
		{"JSON in base64", agentInbox, event(`,"torun":"r","datacontenttype":"application/json; charset=utf-8","data_base64":"IHsibiI6IDF9Cg=="`),
			Inbound{Tenant: "acme", Agent: "counter", Run: "r", ID: id, Data: []byte(`{"n": 1}`)}},
		{"bytes", agentInbox, event(`,"torun":"r","datacontenttype":"image/png","data_base64":"AP\/+"`),
			Inbound{Tenant: "acme", Agent: "counter", Run: "r", ID: id, Data: []byte(`{"datacontenttype":"image/png","base64":"AP/+"}`)}},
		{"bytes of no type", agentInbox, event(`,"torun":"r","data_base64":"AP/+"`),
			Inbound{Tenant: "acme", Agent: "counter", Run: "r", ID: id, Data: []byte(`{"base64":"AP/+"}`)}},
		{"base64 with line ends", agentInbox, event(`,"torun":"r","data_base64":"AP\n/+"`),
			Inbound{Tenant: "acme", Agent: "counter", Run: "r", ID: id, Data: []byte(`{"base64":"AP\n/+"}`)}},
		{"white space", agentInbox, "\t{ \"data\" :\n{ } , \"type\":\"hot\" ,\"specversion\":\"1.0\",\"id\":\"7\",\"source\":\"\\/press/3\",\"torun\":\"r\" }\r\n",
			Inbound{Tenant: "acme", Agent: "counter", Run: "r", ID: id, Data: []byte(`{ }`)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.want.Type, c.want.Source = "hot", "/press/3"
			if got := one(t, in, c.topic, c.payload); !reflect.DeepEqual(got, c.want) {
				t.Errorf("got  %+v\nwant %+v", got, c.want)
			}
		})
	}
}

// An event that several agents get is an input of each, in a run of its own: a run has one agent.
func TestRunsNobodyNamedAreOfOneAgent(t *testing.T) {
	list := inlets(t, "a=x", "a=y").Decode("a", []byte(event(``)), false)
	if len(list) != 2 || list[0].Run == list[1].Run || list[0].ID != list[1].ID {
		t.Errorf("%+v", list)
	}
}

// The id of a CloudEvent without inputid is its source and its id, and no two pairs make one.
func TestInputIDTellsPairsApart(t *testing.T) {
	in := inlets(t)
	ids := map[string]string{}
	for _, source := range []string{"a", "a/", "b", "a%20", "a%20b"} {
		for _, id := range []string{"a", "b a", " a", "/a", "20b a", "a "} {
			payload := fmt.Sprintf(`{"specversion":"1.0","id":%q,"source":%q,"type":"t"}`, id, source)
			got := one(t, in, agentInbox, payload)
			if got.Fault != "" || ids[got.ID] != "" {
				t.Errorf("%s: %s after %s, %s", payload, got.ID, ids[got.ID], got.Fault)
			}
			ids[got.ID] = payload
			if again := one(t, in, agentInbox, payload); again.Run != got.Run || again.Run == "" {
				t.Errorf("%s came to run %q, then to %q", payload, got.Run, again.Run)
			}
		}
	}
}

func TestInboundFaults(t *testing.T) {
	in := inlets(t, "plant/+/temp=thermostat/{1}")
	for _, c := range []struct{ name, topic, payload, want string }{
		{"raw at a node", nodeInbox, `{"n":1}`, "not a CloudEvent: specversion is missing"},
		{"text at a node", nodeInbox, `hello`, "not a CloudEvent: not a JSON object"},
		{"nothing at a node", nodeInbox, ``, "not a CloudEvent"},
		{"half an object", nodeInbox, `{"specversion":"1.0"`, "ends in the middle"},
		{"more than an object", nodeInbox, event(`,"toagent":"a","torun":"r"`) + "x", "goes on after its object"},
		{"no agent", nodeInbox, event(`,"torun":"r"`), "toagent is missing"},
		{"no agent's name", nodeInbox, event(`,"toagent":"a b"`), "toagent"},
		{"the node's own run", nodeInbox, event(`,"toagent":"a","torun":"~node"`), "torun"},
		{"a node's form, broken", nodeInbox, `{"specversion":"1.0","id":"7","source":"/n/acme/r/` + ulid1 + `","type":"t","toagent":"a","torun":"r"}`, "parse cloudevent"},
		{"a tenant's name", "postrider/v1/a b/nodes/edge-1/inbox", event(``), "tenant"},
		{"no tenant", "postrider/v1//agents/counter/inbox", event(``), "tenant"},
		{"another agent", agentInbox, event(`,"toagent":"other"`), "not the topic's"},
		{"kept id", agentInbox, event(`,"inputid":"pr:x"`), "kept for nodes"},
		{"kept id by source", agentInbox, `{"specversion":"1.0","id":"7","source":"pr:x","type":"t"}`, "kept for nodes"},
		{"source with a space", agentInbox, `{"specversion":"1.0","id":"7","source":"a b","type":"t"}`, "has a space"},
		{"version", agentInbox, `{"specversion":"0.3","id":"7","source":"a","type":"t"}`, "is not 1.0"},
		{"number as id", agentInbox, `{"specversion":"1.0","id":7,"source":"a","type":"t"}`, "id: not a string"},
		{"empty id", agentInbox, `{"specversion":"1.0","id":"","source":"a","type":"t"}`, "id is empty"},
		{"empty input id", agentInbox, event(`,"inputid":""`), "inputid is empty"},
		{"number as input id", agentInbox, event(`,"inputid":7`), "inputid: not a string"},
		{"long id", agentInbox, event(`,"inputid":"` + strings.Repeat("x", 513) + `"`), "input id has 513 bytes"},
		{"huge id", agentInbox, event(`,"inputid":"` + strings.Repeat("x", 1<<20) + `"`), "input id has 1048576 bytes"},
		{"NUL in an id", agentInbox, event(`,"inputid":"\u0000"`), "control character"},
		{"half a surrogate in an id", agentInbox, event(`,"inputid":"\ud800"`), "half a surrogate"},
		{"half a surrogate in a name", agentInbox, event(`,"\ud800":1`), "half a surrogate"},
		{"long type", agentInbox, `{"specversion":"1.0","id":"7","source":"a","type":"` + strings.Repeat("x", 256) + `"}`, "type has 256 bytes"},
		{"long source", agentInbox, `{"specversion":"1.0","id":"7","source":"` + strings.Repeat("x", 1025) + `","type":"t","inputid":"x"}`, "source has 1025 bytes"},
		{"twice", agentInbox, event(`,"id":"8"`), "id is there twice"},
		{"not UTF-8", agentInbox, event(",\"data\":\"\xff\""), "not UTF-8"},
		{"both", agentInbox, event(`,"data":1,"data_base64":""`), "both there"},
		{"broken base64", agentInbox, event(`,"data_base64":"A"`), "data_base64"},
		{"base64 that is no JSON", agentInbox, event(`,"datacontenttype":"application/json","data_base64":"AP/+"`), "not the JSON"},
		{"time", agentInbox, event(`,"expirytime":"tomorrow"`), "expirytime"},
		{"long trace", agentInbox, event(`,"traceparent":"` + strings.Repeat("x", 513) + `"`), "traceparent has 513 bytes"},
		{"level that is no name", "plant/press 3/temp", `1`, "run {1} of the topic"},
		{"empty level", "plant//temp", `1`, "is empty"},
		{"long level", "plant/" + strings.Repeat("x", 65) + "/temp", `1`, "longer than 64"},
		{"topic that is not UTF-8", "plant/\xff/temp", `1`, "character other than"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := one(t, in, c.topic, c.payload)
			if !strings.Contains(got.Fault, c.want) {
				t.Errorf("fault %q, want %q", got.Fault, c.want)
			}
			if string(got.Data) != c.payload || got.ID != "" || got.LSN != 0 || got.Type != TypeRaw || !strings.HasPrefix(got.Source, "mqtt:") {
				t.Errorf("%+v", got)
			}
		})
	}
}

// difficult are payloads that a careless hand changes on the way.
var difficult = map[string]string{
	"large integer": `9007199254740993`, "trailing zero": `0.10`, "negative zero": `-0.0`, "half a surrogate": `"\ud800"`,
	"duplicate names": `{"a":1,"a":2}`, "white space": " {\"a\" :\t1}\r\n", "HTML": `"<b>&\u003c"`, "line separators": "\"\u2028\"",
	"depth": strings.Repeat("[", maxDepth-1) + strings.Repeat("]", maxDepth-1), "no CloudEvent": `{"specversion":"1.0","id":null,"source":"a","type":"t"}`,
	"brackets in text": `"` + strings.Repeat("[", 2*maxDepth) + `\"["`, "escaped name": `{"\ud800":1,"\u0069d":2}`,
}

func TestRawPayloadsSurvive(t *testing.T) {
	in := inlets(t, `odd "topic"/\/+=x`, "plant/+/temp=thermostat/line-{1}-{0}")
	check := func(got Inbound, key, value string) {
		t.Helper()
		if got.Fault != "" || got.ID != "" || got.Type != TypeRaw {
			t.Fatalf("%.300v", got)
		}
		if !json.Valid(got.Data) || !utf8.Valid(got.Data) {
			t.Fatalf("not JSON: %.300q", got.Data)
		}
		if want := `,"` + key + `":` + value + `,"retained":false}`; !strings.HasSuffix(string(got.Data), want) {
			t.Errorf("got  %.300q\nwant %.300q", got.Data, want)
		}
		var back struct{ Topic string }
		if err := json.Unmarshal(got.Data, &back); err == nil && "mqtt:"+back.Topic != got.Source {
			t.Errorf("topic %q of %s", back.Topic, got.Source)
		}
	}
	for name, payload := range difficult {
		t.Run(name, func(t *testing.T) {
			got := one(t, in, "plant/press-3/temp", payload)
			check(got, "json", payload)
			if got.Run != "line-press-3-plant" || got.Agent != "thermostat" || got.Tenant != "default" || got.Source != "mqtt:plant/press-3/temp" {
				t.Errorf("%+v", got)
			}
			if event := one(t, in, agentInbox, event(`,"data":`+payload)); event.Fault != "" || string(event.Data) != strings.Trim(payload, " \r\n") {
				t.Errorf("as data of a CloudEvent: %.100q, %s", event.Data, event.Fault)
			}
		})
	}
	if got := one(t, in, `odd "topic"/\/x`, "1"); string(got.Data) != `{"topic":"odd \"topic\"/\\/x","json":1,"retained":false}` {
		t.Errorf("%s", got.Data)
	}
	check(one(t, in, agentInbox, ""), "text", `""`)
	check(one(t, in, agentInbox, "on\n\x00"), "text", `"on\n\u0000"`)
	check(one(t, in, agentInbox, "{1} {2}"), "text", `"{1} {2}"`)
	check(one(t, in, agentInbox, "1 2"), "text", `"1 2"`)
	check(one(t, in, agentInbox, "\"\xff\""), "base64", `"`+base64.StdEncoding.EncodeToString([]byte("\"\xff\""))+`"`)
	if got := one(t, in, `postrider/v1/acme/agents/counter/inbox`, "1"); got.Run != "" {
		t.Errorf("run %q of what may come again as another input", got.Run)
	}
	if got := in.Decode("plant/a/temp", []byte("1"), true)[0]; string(got.Data) != `{"topic":"plant/a/temp","json":1,"retained":true}` {
		t.Errorf("%s", got.Data)
	}
}

// What is too much is refused whole, and not kept whole.
func TestTooMuchIsRefused(t *testing.T) {
	in := inlets(t, "plant/+/temp=thermostat/{1}")
	deep := strings.Repeat("[", maxDepth) + strings.Repeat("]", maxDepth)
	for name, payload := range map[string]string{
		"10 MB":            `"` + strings.Repeat("x", 10<<20) + `"`,
		"10 MB of data":    event(`,"data":"` + strings.Repeat("x", 10<<20) + `"`),
		"as text":          strings.Repeat("\x00", MaxInput/6),
		"as base64":        strings.Repeat("\xff", MaxInput-1000),
		"depth":            deep,
		"too deep to know": "[" + deep + "]",
	} {
		got := one(t, in, "plant/a/temp", payload)
		if got.Fault == "" || len(got.Data) > MaxInput || len(payload) > MaxInput && (len(got.Data) != faultKept || cap(got.Data) > 2*faultKept) {
			t.Errorf("%s: %d bytes, fault %q", name, len(got.Data), got.Fault)
		}
		if !strings.HasPrefix(payload, string(got.Data)) {
			t.Errorf("%s: the payload was changed", name)
		}
	}
	if got := one(t, in, agentInbox, event(`,"data":`+deep)); got.Fault != "" || string(got.Data) != deep {
		t.Errorf("depth %d as data: %s", maxDepth, got.Fault)
	}
}

func TestTopicsMatchRules(t *testing.T) {
	in := inlets(t, "a/+/c=x", "a/#=y/{0}", "+/b/+=z", "a/b/c=w", "+=v")
	for topic, want := range map[string]string{
		"a/b/c": "x y z w", "a/q/c": "x y", "a": "y v", "a/": "y", "a/b": "y", "a/b/c/d": "y", "q/b/": "z", "": "", "$a": "", "$SYS/b/c": "", "/b/c": "z", "b/c": "",
		"a/+/c": "", "#": "", "postrider/b/c": "z", "postrider/v1/acme/agents/other/inbox": "", "postrider/v1/acme/nodes/other/inbox": "",
	} {
		var got []string
		for _, i := range in.Decode(topic, []byte("1"), false) {
			got = append(got, i.Agent)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%q comes to %v, want %s", topic, got, want)
		}
	}
	if got, want := strings.Join(inlets(t, "a=x", "a=y", "b=x").Filters(), " "), "postrider/v1/+/nodes/edge-1/inbox postrider/v1/+/agents/counter/inbox a b"; got != want {
		t.Errorf("filters %s", got)
	}
}

func TestRulesAreChecked(t *testing.T) {
	for s, want := range map[string]string{
		"a=b/+=agent/run-{1}": "", "a=b=agent/{0}": "character", "sensors/+/temp=thermostat/{1}": "", "a=": "agent", "a": "FILTER=AGENT", "=x": "is empty", "a=x/": "no run", "a=x/y/z": "run",
		"a/+=x/{2}": "levels 0 to 1", "a/#=x/{1}": "levels 0 to 0", "a=x/{}": "number", "a=x/{1": "number", "a=x/{-1}": "number", "a=x/{99999999999999999999}": "number",
		"a=x/}": "character", "a b=x/{0}": "character", "a+=x": "whole level", "#/a=x": "whole level", "a#=x": "whole level", "$SYS/#=x": "starts with $",
		"$share/g/a=x": "starts with $", "a\x00=x": "control", "a=~node": "agent", "a=x/~node": "run", "#=x": "", strings.Repeat("a", 65536) + "=x": "longer",
	} {
		_, err := ParseRule(s)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%.80q: %v, want %q", s, err, want)
		}
	}
	for filter, ok := range map[string]bool{
		"postrider": false, "postrider/x": false, "postrider/v1/#": false, "postriders/x": true, "#": false, "+/#": false, "+/v1/#": false, "+/+/+/+/+": false,
		"+/temp": true, "+/+/+/+": true, "+/v2/#": true, "other/#": true, "+/v1/acme/events/+/+/+": false,
	} {
		in := Inlets{Node: "n", Rules: []Rule{{Filter: filter, Agent: "x"}}}
		if err := in.Check(); (err == nil) != ok {
			t.Errorf("%s: %v", filter, err)
		}
	}
	r := Rule{Filter: "a", Agent: "x"}
	for name, in := range map[string]Inlets{
		"rule twice": {Node: "n", Rules: []Rule{r, {Filter: "a", Agent: "y"}, r}}, "agent twice": {Node: "n", Public: []string{"a", "b", "a"}},
		"node": {Node: "a b"}, "agent": {Node: "n", Public: []string{"a/b"}},
	} {
		if in.Check() == nil {
			t.Errorf("%s passes", name)
		}
	}
}

// What the official SDK writes arrives as what was put in.
func TestInboundReadsTheOfficialSDK(t *testing.T) {
	in := inlets(t)
	send := func(contentType string, data any) Inbound {
		t.Helper()
		e := ce.New("1.0")
		e.SetID("a b\"\\\u00e9")
		e.SetSource("https://example.com/sensors?id=3#x")
		e.SetType("com.example.hot")
		e.SetExtension("torun", "run-1")
		e.SetExtension("correlationid", "c-9")
		e.SetExtension("hops", 3) // a number, and another's
		if err := e.SetData(contentType, data); err != nil {
			t.Fatal(err)
		}
		payload, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		return one(t, in, agentInbox, string(payload))
	}
	for _, c := range []struct {
		contentType string
		data        any
		want        string
	}{
		{"application/json", map[string]int{"n": 3}, `{"n":3}`},
		{"application/json", []byte(`{"n": 9007199254740993}`), `{"n": 9007199254740993}`},
		{"application/cloudevents+json", []byte(`[0.10]`), `[0.10]`},
		{"image/png", []byte{0, 255, 254}, `{"datacontenttype":"image/png","base64":"AP/+"}`},
		{"text/plain", "hot", `"hot"`},
	} {
		got := send(c.contentType, c.data)
		want := Inbound{Tenant: "acme", Agent: "counter", Run: "run-1", ID: "https://example.com/sensors?id=3#x a b\"\\\u00e9", Type: "com.example.hot",
			Source: "https://example.com/sensors?id=3#x", Correlation: "c-9", Data: []byte(c.want)}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s:\ngot  %+v\nwant %+v, data %s", c.contentType, got, want, c.want)
		}
	}
}

// Whatever comes becomes inputs within all limits, or faults.
func FuzzInbound(f *testing.F) {
	for _, r := range []Record{command(), sample(), full()} {
		f.Add(nodeInbox, r.AppendCloudEvent(nil))
	}
	for _, payload := range difficult {
		f.Add("plant/a/temp", []byte(payload))
	}
	for _, more := range []string{``, `,"toagent":"counter","torun":"r"`, `,"inputid":"x","data":{}`, `,"data_base64":"AP/+"`, `,"expirytime":"1970-01-01T00:00:00Z"`} {
		f.Add(agentInbox, []byte(event(more)))
		f.Add(nodeInbox, []byte(event(more)))
	}
	f.Add("plant/\xff/temp", []byte("\xff"))
	f.Add("postrider/v1/+/nodes/edge-1/inbox", []byte("{"))
	in := inlets(f, "plant/+/temp=thermostat/{1}", "plant/#=logger", "+/x=other/r")
	f.Fuzz(func(t *testing.T, topic string, payload []byte) {
		before := string(payload)
		for _, i := range in.Decode(topic, payload, true) {
			if string(payload) != before {
				t.Fatal("the payload was changed")
			}
			if !utf8.ValidString(i.Source) || !utf8.ValidString(i.Fault) {
				t.Fatalf("not UTF-8: %q, %q", i.Source, i.Fault)
			}
			if i.Fault != "" {
				if string(i.Data) != before || i.ID != "" || i.LSN != 0 {
					t.Fatalf("fault %s with %+v", i.Fault, i)
				}
				continue
			}
			if err := checkInput(i.Type, i.ID, i.Data); err != nil && i.ID != "" {
				t.Fatal(err)
			}
			if !utf8.Valid(i.Data) || !json.Valid(i.Data) {
				t.Fatalf("data is no JSON: %q", i.Data)
			}
			if CheckName(i.Tenant) != nil || CheckName(i.Agent) != nil || i.Run != "" && CheckName(i.Run) != nil || i.Source == "" {
				t.Fatalf("%+v", i)
			}
			if i.ID == "" && (i.Type != TypeRaw || i.Source != "mqtt:"+topic || i.LSN != 0) {
				t.Fatalf("no id: %+v", i)
			}
			if strings.HasPrefix(i.ID, inputPrefix) && i.LSN == 0 {
				t.Fatalf("a node's id from somebody else: %+v", i)
			}
			if (i.LSN != 0) != (CheckBranch(i.From.Branch) == nil) {
				t.Fatalf("half a sender: %+v", i)
			}
		}
	})
}
