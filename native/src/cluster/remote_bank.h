// RemoteBank: the placement of experts on other servers, and the rows that are sent there.
//
// An expert that is in no file here must be computed by a server that has it. If none is there, its rows wait for one:
// a few seconds from their request, and from the last change of placement or the last loss.
//
// All rows of an expert in a ubatch are computed in one place, because kernels depend on their number. Of the joined
// servers with an expert, the one with the earliest expected answer gets it. A lost server has no experts until it
// joins again: experts that no other server has are computed here meanwhile.

#pragma once

#include "base/mutex.h"
#include "cluster/peer.h"
#include "residency/tier.h"

#include <memory>

namespace pyorch {

// Slots of a ubatch that one server computes.
struct RemoteRows {
    std::vector<int>        slots;       // ascending, of [n_tokens][n_used]
    std::shared_ptr<Frame>  frame;       // the request
    std::shared_ptr<Answer> answer;      // null: not asked yet
    int                     peer   = -1; // number of the server; -1: none
    std::vector<int>        failed = {}; // numbers of servers that cannot, or were lost for too long
    Clock::time_point       until  = {}; // waits for servers until then; unset: no server has failed yet
};

// Expected seconds to read experts of a layer from the own disk.
struct ReadCost {
    double queued = 0; // before the first read
    double expert = 0; // for each; 0: unknown
    double busy   = 0; // share of recent time in which layers of this server waited for that disk

    bool known() const { return expert > 0; }
};

class RemoteBank : public Tier {
public:
    // lacking: by layer and expert, nonzero if no file here has it; empty: none. patience: how long their rows wait for
    // a server.
    explicit RemoteBank(std::vector<LayerShape> of_layers, std::vector<std::vector<uint8_t>> lacking = {},
        std::chrono::milliseconds patience = std::chrono::seconds(5));
    ~RemoteBank() override;

    RemoteBank(const RemoteBank &)             = delete;
    RemoteBank & operator=(const RemoteBank &) = delete;

    const std::vector<LayerShape> layers;

    // elsewhere: by expert, nonzero if another server computes it now. Called by any thread after each possible change;
    // set it once, before the first connect().
    using Changed = std::function<void(int layer, const std::vector<uint8_t> & elsewhere)>;
    void on_change(Changed changed);

    // Returns the number of a server, from 0. Throws Failure if it does not join.
    int  connect(const PeerConfig & config);
    void disconnect(int peer);

    std::shared_ptr<Peer> peer(int number); // throws Failure

    // peers [n_expert][n_places]: the numbers of the servers that can compute each expert; -1 ends a list. An expert
    // with an empty list is computed here.
    void place(int layer, const std::vector<int> & peers, int n_places);

    // Returns whether any expert has another place, or needs one.
    bool active() const { return lacks_any || is_active; }

    // Sends the slots of a ubatch [n_tokens][n_used] that other servers compute, and marks their experts. inputs:
    // [n_tokens][n_in]; here: by expert, nonzero if it is computed here whatever its place. Sends nothing that a server
    // would answer later than its experts could be read.
    std::vector<RemoteRows> send(int layer, int n_tokens, int n_used, const int32_t * experts, const float * weights,
        const float * inputs, const std::vector<uint8_t> & here, const ReadCost & read,
        std::vector<uint8_t> & elsewhere);

    // After a failed answer: distributes the slots that cannot be computed here to other servers with their experts, or
    // to the same one when it is back; nothing is asked yet. Waits for a server that may come. Empty if all can be
    // computed here, or no server has them.
    std::vector<RemoteRows> send_again(int layer, const RemoteRows & lost);

    // Waits for the answer, and asks first if needed. False: it failed.
    bool wait(int layer, RemoteRows & rows);

    // Whether an expert of another server may be read here; false at first.
    void allow_reads(bool allowed) { may_read = allowed; }
    bool reads_allowed() const { return may_read; }

    // The next ubatch is a trial whose outputs are not used, unless a placement comes before it.
    void expect_trial() { is_trial = true; }
    bool take_trial() { return is_trial && is_trial.exchange(false); }

    // Sets mask[n_expert] to 1 for each expert of the layer that another server computes now.
    void mark(int layer, std::vector<uint8_t> & mask) override;

    pyorch_remote_counts counts();
    void                 waited(uint64_t ns, uint64_t n_fallback);

private:
    const std::vector<std::vector<uint8_t>>    lacking;
    const bool                                 lacks_any;
    const std::chrono::milliseconds            patience;
    std::atomic<bool>                          is_active{ false };
    std::atomic<bool>                          may_read{ false };
    std::atomic<bool>                          is_trial{ false };
    Mutex                                      mutex;
    CondVar                                    arrived; // a server joined, or a placement came
    std::vector<std::shared_ptr<Peer>>         peers GUARDED_BY(mutex);
    std::vector<std::vector<std::vector<int>>> placement GUARDED_BY(mutex);      // by layer and expert; empty: here
    Clock::time_point                          placed_at GUARDED_BY(mutex) = {}; // of the last placement
    pyorch_remote_counts                       counters GUARDED_BY(mutex)  = {};

    Mutex   telling; // so that the newest state is told last
    Changed changed;

    void              tell(int layer);
    void              tell_all();
    bool              computes(int peer) const REQUIRES(mutex) { return peers[peer] && peers[peer]->joined(); }
    bool              lacks(int layer, int expert) const { return !lacking.empty() && lacking[layer][expert]; }
    Clock::time_point last_change() const REQUIRES(mutex);
    std::vector<std::vector<int>> choose(int layer, const std::vector<int> & wanted,
        const std::vector<std::vector<int>> & slots_of, const std::vector<int> & failed,
        std::vector<uint8_t> & is_chosen) const REQUIRES(mutex);
    size_t                        keep_for_reading(int layer, const ReadCost & read, int n_read,
        const std::vector<std::vector<int>> & slots_of, std::vector<std::vector<int>> & experts_at) const
        REQUIRES(mutex);
};

} // namespace pyorch
